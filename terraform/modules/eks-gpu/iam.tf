resource "aws_iam_role" "node" {
  name                 = "${var.cluster_name}-${var.name}"
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
  for_each = setunion(["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly"], var.additional_managed_policies)

  role       = aws_iam_role.node.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/${each.value}"
}
