# A build instance in a private subnet: Packer reaches its ssh through a session of Systems Manager, which the instance's agent opens
# from inside. Its role may answer Systems Manager and nothing else; what AmazonSSMManagedInstanceCore allows beyond this (reading every
# parameter of the account, for one) is not needed.

locals {
  session_manager    = var.session_manager || var.build_instance_role_arn != null
  makes_build_role   = var.session_manager && var.build_instance_role_arn == null
  made_role_arn      = one(aws_iam_role.build_instance[*].arn)
  build_instance_arn = "${local.ec2}:${local.account}:instance/*"

  build_instance_role_arn = var.build_instance_role_arn != null ? var.build_instance_role_arn : local.made_role_arn
}

resource "aws_iam_role" "build_instance" {
  count = local.makes_build_role ? 1 : 0

  name                 = "${var.name}-build"
  description          = "Build instances of images: may answer Systems Manager, and nothing else"
  max_session_duration = 3600
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

resource "aws_iam_role_policy" "build_instance" {
  count = local.makes_build_role ? 1 : 0

  name = "systems-manager-session"
  role = aws_iam_role.build_instance[0].id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid      = "Register"
        Effect   = "Allow"
        Action   = ["ssm:UpdateInstanceInformation"]
        Resource = [local.build_instance_arn]
      },
      {
        # These four know no resources; AWS accepts only "*" here.
        Sid    = "Session"
        Effect = "Allow"
        Action = [
          "ssmmessages:CreateControlChannel",
          "ssmmessages:CreateDataChannel",
          "ssmmessages:OpenControlChannel",
          "ssmmessages:OpenDataChannel",
        ]
        Resource = ["*"]
      },
    ]
  })
}

resource "aws_iam_instance_profile" "build_instance" {
  count = local.makes_build_role ? 1 : 0

  name = aws_iam_role.build_instance[0].name
  role = aws_iam_role.build_instance[0].name
  tags = var.tags
}
