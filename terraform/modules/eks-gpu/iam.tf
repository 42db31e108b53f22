locals {
  # IAM allows a role 64 characters, EKS a cluster 100. A digest keeps two shortened names apart.
  node_name      = "${var.cluster_name}-${var.name}"
  node_role_name = length(local.node_name) <= 64 ? local.node_name : "${substr(local.node_name, 0, 55)}-${substr(sha256(local.node_name), 0, 8)}"
}

resource "aws_iam_role" "node" {
  name                 = local.node_role_name
  description          = "GPU nodes of ${var.name}"
  permissions_boundary = var.permissions_boundary_arn
  tags                 = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

# What EKS asks of a node's role: AWS keeps these policies in step with the kubelet, so they are not restated here.
resource "aws_iam_role_policy_attachment" "node" {
  for_each = setunion(
    ["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly"],
    var.cni_uses_node_role && !local.ipv6 ? ["AmazonEKS_CNI_Policy"] : [],
    var.additional_managed_policies,
  )

  role       = aws_iam_role.node.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/${each.value}"
}

resource "aws_iam_role_policy_attachment" "additional" {
  for_each = var.additional_policy_arns

  role       = aws_iam_role.node.name
  policy_arn = each.value
}

# AWS has no managed policy for IPv6: Amazon EKS User Guide, "Configure Amazon VPC CNI plugin to use IRSA", AmazonEKS_CNI_IPv6_Policy.
resource "aws_iam_role_policy" "cni_ipv6" {
  count = var.cni_uses_node_role && local.ipv6 ? 1 : 0

  name = "vpc-cni-ipv6"
  role = aws_iam_role.node.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        # The interface that is assigned to has no tag of ours yet.
        Sid      = "AssignAddresses"
        Effect   = "Allow"
        Action   = "ec2:AssignIpv6Addresses"
        Resource = "arn:${data.aws_partition.current.partition}:ec2:*:*:network-interface/*"
      },
      {
        # Describing knows no resources.
        Sid    = "Describe"
        Effect = "Allow"
        Action = [
          "ec2:DescribeInstances",
          "ec2:DescribeInstanceTypes",
          "ec2:DescribeNetworkInterfaces",
          "ec2:DescribeTags",
        ]
        Resource = "*"
      },
      {
        Sid      = "TagInterfaces"
        Effect   = "Allow"
        Action   = "ec2:CreateTags"
        Resource = "arn:${data.aws_partition.current.partition}:ec2:*:*:network-interface/*"
      },
    ]
  })
}

resource "aws_iam_role_policy" "withheld" {
  count = var.withheld.topic_arn == null ? 0 : 1

  name = "report-withheld-instances"
  role = aws_iam_role.node.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid      = "Publish"
      Effect   = "Allow"
      Action   = "sns:Publish"
      Resource = var.withheld.topic_arn
    }]
  })
}
