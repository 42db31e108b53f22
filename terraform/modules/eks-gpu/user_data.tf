# An image of one's own gets no user data from EKS, so the node is told here how to join, with labels and taint from its
# first moment on: no pod that asks for no GPU may land between registration and the taint.

locals {
  kubelet_flags = [
    "--node-labels=${join(",", [for key, value in local.labels : "${key}=${value}"])}",
    "--register-with-taints=${local.taint.key}=${local.taint.value}:NoSchedule",
  ]

  nodeadm = <<-EOT
    MIME-Version: 1.0
    Content-Type: multipart/mixed; boundary="gpu-bringup"

    --gpu-bringup
    Content-Type: application/node.eks.aws

    ${jsonencode({
  apiVersion = "node.eks.aws/v1alpha1"
  kind       = "NodeConfig"
  spec = {
    cluster = {
      name                 = data.aws_eks_cluster.this.name
      apiServerEndpoint    = data.aws_eks_cluster.this.endpoint
      certificateAuthority = data.aws_eks_cluster.this.certificate_authority[0].data
      cidr                 = data.aws_eks_cluster.this.kubernetes_network_config[0].service_ipv4_cidr
    }
    kubelet = { flags = local.kubelet_flags }
  }
})}

    --gpu-bringup--
  EOT

bootstrap = <<-EOT
    #!/bin/bash
    set -euo pipefail
    exec /etc/eks/bootstrap.sh '${data.aws_eks_cluster.this.name}' \
      --apiserver-endpoint '${data.aws_eks_cluster.this.endpoint}' \
      --b64-cluster-ca '${data.aws_eks_cluster.this.certificate_authority[0].data}' \
      --kubelet-extra-args '${join(" ", local.kubelet_flags)}'
  EOT

user_data = var.operating_system == "al2023" ? local.nodeadm : local.bootstrap
}
