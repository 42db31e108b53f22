# What an account needs once, so that `cargo xtask validate-ami --ami` can launch an instance from an AMI and judge it: a
# security group without ingress, a role that can do nothing but answer Systems Manager, a policy for whoever launches,
# and a sweeper that ends what was left behind. The instance itself lives for minutes and is launched by that command:
# its only record is its tags, so that there is no state file to lose.

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.region
  ec2       = "arn:${local.partition}:ec2:${local.region}"

  # The tags that `cargo xtask validate-ami` gives its instances and volumes (packer/tasks/src/validate_ami/aws/tags.rs).
  run_tag      = "gpu-bringup.dev/validate-ami"
  deadline_tag = "gpu-bringup.dev/terminate-after"
}

resource "aws_security_group" "instance" {
  name        = "gpu-bringup-${var.name}"
  description = "Instances that validate an AMI: nothing reaches them, they reach HTTPS"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "gpu-bringup-${var.name}" })
}

# The agent of Systems Manager opens the connection; ssh travels inside it. So there is no ingress rule at all.
resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.instance.id
  description       = "Systems Manager"
  cidr_ipv4         = var.egress_cidr_ipv4
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  tags              = var.tags
}

resource "aws_iam_role" "instance" {
  name                 = "gpu-bringup-${var.name}"
  description          = "Instances that validate an AMI: may answer Systems Manager, and nothing else"
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

# What AmazonSSMManagedInstanceCore allows beyond this (reading every parameter of the account, for one) is not needed.
resource "aws_iam_role_policy" "instance" {
  name = "systems-manager-session"
  role = aws_iam_role.instance.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid      = "Register"
        Effect   = "Allow"
        Action   = "ssm:UpdateInstanceInformation"
        Resource = "${local.ec2}:${local.account}:instance/*"
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
        Resource = "*"
      },
    ]
  })
}

resource "aws_iam_instance_profile" "instance" {
  name = aws_iam_role.instance.name
  role = aws_iam_role.instance.name
  tags = var.tags
}

# What `cargo xtask validate-ami` needs to know about this account.
resource "aws_ssm_parameter" "foundation" {
  name        = "/gpu-bringup/${var.name}"
  description = "Where cargo xtask validate-ami launches its instances"
  type        = "String"
  tags        = var.tags

  value = jsonencode({
    subnet_ids            = var.subnet_ids
    security_group_id     = aws_security_group.instance.id
    instance_profile_name = aws_iam_instance_profile.instance.name
    kms_key_arn           = var.kms_key_arn
  })
}
