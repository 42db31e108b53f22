# An image of one's own gets no user data from EKS, so the node is told here how to join, with labels and taints from its
# first moment on: no pod that asks for no GPU may land between registration and the taint.

locals {
  network = data.aws_eks_cluster.this.kubernetes_network_config[0]

  # EKS sets its own labels a while after a node has registered; selectors of spot and on-demand capacity must not miss it until then.
  registered_labels = merge(local.labels, {
    "eks.amazonaws.com/capacityType" = var.capacity_type
    "eks.amazonaws.com/nodegroup"    = var.name
  })
  registered_taints = concat(
    ["${local.taint.key}=${local.taint.value}:NoSchedule"],
    var.register_unvalidated ? ["${local.startup_taint.key}=${local.startup_taint.value}:${local.startup_taint.effect}"] : [],
  )
  kubelet_flags = [
    "--node-labels=${join(",", [for key, value in local.registered_labels : "${key}=${value}"])}",
    "--register-with-taints=${join(",", local.registered_taints)}",
  ]

  node_config = jsonencode({
    apiVersion = "node.eks.aws/v1alpha1"
    kind       = "NodeConfig"
    spec = {
      cluster = {
        name                 = data.aws_eks_cluster.this.name
        apiServerEndpoint    = data.aws_eks_cluster.this.endpoint
        certificateAuthority = data.aws_eks_cluster.this.certificate_authority[0].data
        # Its family decides which address the node has.
        cidr = local.ipv6 ? local.network.service_ipv6_cidr : local.network.service_ipv4_cidr
      }
      kubelet = { flags = local.kubelet_flags }
    }
  })

  # Canonical's script wants to know the family where it is not to ask EKS for it. The image's own template gives containerd the
  # handler nvidia, so that the runtime stays the default one.
  bootstrap = <<-EOT
    #!/bin/bash
    set -euo pipefail
    exec /etc/eks/bootstrap.sh '${data.aws_eks_cluster.this.name}' \
      --apiserver-endpoint '${data.aws_eks_cluster.this.endpoint}' \
      --b64-cluster-ca '${data.aws_eks_cluster.this.certificate_authority[0].data}' \
      --ip-family '${local.ipv6 ? "ipv6" : "ipv4"}' \
      ${local.ipv6 ? "--service-ipv6-cidr '${local.network.service_ipv6_cidr}'" : "--dns-cluster-ip '${cidrhost(local.network.service_ipv4_cidr, 10)}'"} \
      --kubelet-extra-args '${join(" ", local.kubelet_flags)}'
  EOT

  # Written before the validation starts: cloud-init writes files before the network is up.
  withheld_lines = compact([
    var.withheld.power_off_after_hours == null ? "" : "POWER_OFF_AFTER_HOURS=${var.withheld.power_off_after_hours}",
    var.withheld.topic_arn == null ? "" : "TOPIC_ARN=${var.withheld.topic_arn}",
  ])
  withheld = length(local.withheld_lines) == 0 ? [] : [{
    type = "text/cloud-config"
    content = "#cloud-config\n${jsonencode({
      write_files = [{
        path        = "/etc/gpu-validator/withheld.conf"
        permissions = "0644"
        content     = "${join("\n", local.withheld_lines)}\n"
      }]
    })}"
  }]

  parts = concat(
    var.operating_system == "al2023" ? [{ type = "application/node.eks.aws", content = local.node_config }] : [{ type = "text/x-shellscript", content = local.bootstrap }],
    local.withheld,
  )

  multipart = <<-EOT
    MIME-Version: 1.0
    Content-Type: multipart/mixed; boundary="gpu-bringup"

    ${join("\n", [for part in local.parts : "--gpu-bringup\nContent-Type: ${part.type}\n\n${part.content}\n"])}
    --gpu-bringup--
  EOT

  user_data = local.multipart
}
