# A managed node group of GPU nodes from a validated image.

data "aws_partition" "current" {}

data "aws_eks_cluster" "this" {
  name = var.cluster_name
}

locals {
  labels = merge(var.labels, { "nvidia.com/gpu" = "true", role = "gpu" })
  taint  = { key = "nvidia.com/gpu", value = "true", effect = "NO_SCHEDULE" }
  ipv6   = data.aws_eks_cluster.this.kubernetes_network_config[0].ip_family == "ipv6"

  # Registered by the kubelet alone: the gate removes it, and a taint of the node group would be on the node for good.
  startup_taint = { key = "gpu-bringup.dev/unvalidated", value = "true", effect = "NoSchedule" }

  # With interfaces of its own a launch template names security groups there and nowhere else.
  security_group_ids = concat(
    [data.aws_eks_cluster.this.vpc_config[0].cluster_security_group_id],
    aws_security_group.efa[*].id,
  )
}

resource "aws_placement_group" "this" {
  count = local.placement_group ? 1 : 0

  name     = "${var.cluster_name}-${var.name}"
  strategy = "cluster"
  tags     = var.tags
}

# EFA passes traffic only between members of a security group that allows all of it, in and out, to itself.
resource "aws_security_group" "efa" {
  count = local.efa ? 1 : 0

  name        = "${var.cluster_name}-${var.name}-efa"
  description = "Elastic Fabric Adapter between the nodes of ${var.name}"
  vpc_id      = data.aws_eks_cluster.this.vpc_config[0].vpc_id
  tags        = merge(var.tags, { Name = "${var.cluster_name}-${var.name}-efa" })
}

resource "aws_vpc_security_group_ingress_rule" "efa" {
  count = local.efa ? 1 : 0

  security_group_id            = aws_security_group.efa[0].id
  referenced_security_group_id = aws_security_group.efa[0].id
  description                  = "From the other nodes"
  ip_protocol                  = "-1"
  tags                         = var.tags
}

resource "aws_vpc_security_group_egress_rule" "efa" {
  count = local.efa ? 1 : 0

  security_group_id            = aws_security_group.efa[0].id
  referenced_security_group_id = aws_security_group.efa[0].id
  description                  = "To the other nodes"
  ip_protocol                  = "-1"
  tags                         = var.tags
}

resource "aws_launch_template" "this" {
  name                   = "${var.cluster_name}-${var.name}"
  description            = "GPU nodes of ${var.name}"
  image_id               = var.ami_id
  user_data              = base64encode(local.user_data)
  update_default_version = true
  ebs_optimized          = "true"
  vpc_security_group_ids = local.efa ? null : local.security_group_ids
  tags                   = var.tags

  # Pods on the node reach the metadata service only through the host's network. Tags in it are off, whatever the account's
  # default: EC2 then refuses tag keys with a slash, which EKS and the autoscaler set on every node
  # (terraform-aws-modules/terraform-aws-eks issue 1785, eksctl-io/eksctl issue 8446).
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "disabled"
  }

  # EKS images of both operating systems are of one volume; the device that it is called differs.
  block_device_mappings {
    device_name = var.operating_system == "al2023" ? "/dev/xvda" : "/dev/sda1"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.root_volume_gib
      encrypted             = "true"
      kms_key_id            = var.kms_key_arn
      delete_on_termination = "true"
    }
  }

  # The first card carries IP as well; the others only EFA, which takes no addresses from the subnet.
  dynamic "network_interfaces" {
    for_each = range(local.efa_count)

    content {
      network_card_index    = network_interfaces.value
      device_index          = network_interfaces.value == 0 ? 0 : 1
      interface_type        = network_interfaces.value == 0 ? "efa" : "efa-only"
      security_groups       = local.security_group_ids
      delete_on_termination = "true"
    }
  }

  dynamic "placement" {
    for_each = aws_placement_group.this

    content {
      group_name = placement.value.name
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = var.capacity_reservation_id[*]

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "instance_market_options" {
    for_each = var.capacity_type == "CAPACITY_BLOCK" ? [true] : []

    content {
      market_type = "capacity-block"
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume"])

    content {
      resource_type = tag_specifications.value
      tags          = merge(var.tags, { Name = "${var.cluster_name}-${var.name}" })
    }
  }

  lifecycle {
    precondition {
      condition     = !local.efa || local.has_efa
      error_message = "EFA is asked for, but ${join(", ", var.instance_types)} do not all have the same number of EFA interfaces."
    }
  }
}

resource "aws_eks_node_group" "this" {
  cluster_name    = var.cluster_name
  node_group_name = var.name
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = var.subnet_ids
  ami_type        = "CUSTOM"
  instance_types  = var.instance_types
  capacity_type   = var.capacity_type
  labels          = local.labels

  launch_template {
    id      = aws_launch_template.this.id
    version = aws_launch_template.this.latest_version
  }

  scaling_config {
    min_size     = var.scaling.min_size
    max_size     = var.scaling.max_size
    desired_size = coalesce(var.scaling.desired_size, var.scaling.min_size)
  }

  taint {
    key    = local.taint.key
    value  = local.taint.value
    effect = local.taint.effect
  }

  update_config {
    max_unavailable = 1
  }

  # The autoscaler from zero nodes on reads what a node would be from these tags.
  tags = merge(
    var.tags,
    { for key, value in local.labels : "k8s.io/cluster-autoscaler/node-template/label/${key}" => value },
    { "k8s.io/cluster-autoscaler/node-template/taint/${local.taint.key}" = "${local.taint.value}:NoSchedule" },
  )

  lifecycle {
    ignore_changes = [scaling_config[0].desired_size]

    precondition {
      condition     = !local.placement_group || length(var.subnet_ids) == 1
      error_message = "A placement group is within one availability zone, so ${var.name} needs exactly one subnet."
    }

    precondition {
      condition     = var.capacity_type != "CAPACITY_BLOCK" || var.capacity_reservation_id != null
      error_message = "A capacity block is a capacity reservation: capacity_reservation_id is missing."
    }

    precondition {
      condition     = var.capacity_type != "SPOT" || var.capacity_reservation_id == null
      error_message = "Spot instances do not run in a capacity reservation."
    }
  }

  # A node that cannot pull images or get addresses stays NotReady, and so does the node group.
  depends_on = [
    aws_iam_role_policy_attachment.node,
    aws_iam_role_policy_attachment.additional,
    aws_iam_role_policy.cni_ipv6,
    aws_iam_role_policy.withheld,
  ]
}
