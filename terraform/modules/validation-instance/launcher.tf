# The policy for a person or pipeline that runs `cargo xtask validate-ami --ami`. It can launch instances only as that
# command does: with our role, IMDSv2, an encrypted volume, in our subnets, and with the tag by which they are ended.

locals {
  instances         = "${local.ec2}:${local.account}:instance/*"
  volumes           = "${local.ec2}:${local.account}:volume/*"
  network_interface = "${local.ec2}:${local.account}:network-interface/*"
  spot_requests     = "${local.ec2}:${local.account}:spot-instances-request/*"
  launched_by_us    = { StringLike = { "aws:ResourceTag/${local.run_tag}" = "?*" } }

  launcher_statements = concat([
    {
      Sid      = "ReadFoundation"
      Effect   = "Allow"
      Action   = ["ssm:GetParameter"]
      Resource = [aws_ssm_parameter.foundation.arn]
    },
    {
      # Describing knows no resources; AWS accepts only "*" here.
      Sid       = "Look"
      Effect    = "Allow"
      Action    = ["ec2:DescribeImages", "ec2:DescribeInstances", "ec2:DescribeVolumes"]
      Resource  = ["*"]
      Condition = { StringEquals = { "aws:RequestedRegion" = local.region } }
    },
    {
      Sid    = "LaunchIn"
      Effect = "Allow"
      Action = ["ec2:RunInstances"]
      Resource = concat(
        [
          aws_security_group.instance.arn,
          "${local.ec2}::image/*",
          "${local.ec2}:${local.account}:capacity-reservation/*",
          "${local.ec2}::snapshot/*",
          local.network_interface,
          local.spot_requests,
        ],
        [for id in var.subnet_ids : "${local.ec2}:${local.account}:subnet/${id}"],
      )
    },
    {
      Sid      = "LaunchInstance"
      Effect   = "Allow"
      Action   = ["ec2:RunInstances"]
      Resource = [local.instances]
      Condition = {
        StringEquals = { "ec2:MetadataHttpTokens" = "required" }
        ArnEquals    = { "ec2:InstanceProfile" = aws_iam_instance_profile.instance.arn }
        StringLike   = { "aws:RequestTag/${local.run_tag}" = "?*", "aws:RequestTag/${local.deadline_tag}" = "?*" }
      }
    },
    {
      Sid      = "LaunchVolume"
      Effect   = "Allow"
      Action   = ["ec2:RunInstances"]
      Resource = [local.volumes]
      Condition = {
        Bool       = { "ec2:Encrypted" = "true" }
        StringLike = { "aws:RequestTag/${local.run_tag}" = "?*" }
      }
    },
    {
      Sid       = "TagAtLaunch"
      Effect    = "Allow"
      Action    = ["ec2:CreateTags"]
      Resource  = [local.instances, local.volumes]
      Condition = { StringEquals = { "ec2:CreateAction" = "RunInstances" } }
    },
    {
      Sid       = "End"
      Effect    = "Allow"
      Action    = ["ec2:TerminateInstances", "ec2:DeleteVolume"]
      Resource  = [local.instances, local.volumes]
      Condition = local.launched_by_us
    },
    {
      Sid       = "GiveRole"
      Effect    = "Allow"
      Action    = ["iam:PassRole"]
      Resource  = [aws_iam_role.instance.arn]
      Condition = { StringEquals = { "iam:PassedToService" = "ec2.amazonaws.com" } }
    },
    {
      Sid       = "ConnectToInstance"
      Effect    = "Allow"
      Action    = ["ssm:StartSession"]
      Resource  = [local.instances]
      Condition = { StringLike = { "ssm:resourceTag/${local.run_tag}" = "?*" } }
    },
    {
      Sid      = "ConnectBySsh"
      Effect   = "Allow"
      Action   = ["ssm:StartSession"]
      Resource = ["arn:${local.partition}:ssm:${local.region}::document/AWS-StartSSHSession"]
    },
    {
      Sid      = "EndOwnSession"
      Effect   = "Allow"
      Action   = ["ssm:TerminateSession"]
      Resource = ["arn:${local.partition}:ssm:${local.region}:${local.account}:session/$${aws:userid}-*"]
    },
    ], var.kms_key_arn == null ? [] : [
    {
      Sid       = "EncryptVolume"
      Effect    = "Allow"
      Action    = ["kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKeyWithoutPlaintext", "kms:ReEncryptFrom", "kms:ReEncryptTo"]
      Resource  = [var.kms_key_arn]
      Condition = { StringEquals = { "kms:ViaService" = "ec2.${local.region}.amazonaws.com" } }
    },
    {
      Sid       = "LetEbsUseKey"
      Effect    = "Allow"
      Action    = ["kms:CreateGrant"]
      Resource  = [var.kms_key_arn]
      Condition = { Bool = { "kms:GrantIsForAWSResource" = "true" } }
    },
  ])
}

resource "aws_iam_policy" "launcher" {
  name        = "gpu-bringup-${var.name}-launcher"
  description = "May run cargo xtask validate-ami --ami, and nothing else"
  policy      = jsonencode({ Version = "2012-10-17", Statement = local.launcher_statements })
  tags        = var.tags
}
