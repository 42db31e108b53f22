# What Packer's amazon-ebs builder calls for the templates of packer/, and nothing else. Everything that it makes carries the tag
# `Name = build of <ami_name_prefix>-…` from the call that makes it (`run_tags`), and only what carries it can be changed or removed.
#
# Source: hashicorp/packer-plugin-amazon v1.8.2, builder/ebs/builder.go and the steps in common/ that it lists. The policy in that plugin's
# README also has what these templates do not use: volumes of their own, copies between regions, Windows passwords, sharing.

locals {
  built_by_packer = { StringLike = { "aws:ResourceTag/Name" = "build of ${var.ami_name_prefix}-*" } }
  made_by_packer  = { StringLike = { "aws:RequestTag/Name" = "build of ${var.ami_name_prefix}-*" } }
  own             = "${local.ec2}:${local.account}"

  # Where a template names no subnet, Packer takes one of the default VPC.
  subnets = length(var.subnet_ids) == 0 ? ["${local.own}:subnet/*"] : [for id in var.subnet_ids : "${local.own}:subnet/${id}"]

  bake_statements = concat([
    {
      # Describing knows no resources; AWS accepts only "*" here.
      Sid    = "Describe"
      Effect = "Allow"
      Action = [
        "ec2:DescribeImages",
        "ec2:DescribeInstances",
        "ec2:DescribeInstanceStatus",
        "ec2:DescribeInstanceTypeOfferings",
        "ec2:DescribeRegions",
        "ec2:DescribeSecurityGroups",
        "ec2:DescribeSnapshots",
        "ec2:DescribeSubnets",
        "ec2:DescribeVolumes",
        "ec2:DescribeVpcs",
      ]
      Resource  = ["*"]
      Condition = { StringEquals = { "aws:RequestedRegion" = local.region } }
    },
    {
      Sid       = "MakeKeyAndSecurityGroup"
      Effect    = "Allow"
      Action    = ["ec2:CreateKeyPair", "ec2:CreateSecurityGroup"]
      Resource  = ["${local.own}:key-pair/packer_*", "${local.own}:security-group/*"]
      Condition = local.made_by_packer
    },
    {
      # CreateSecurityGroup needs the VPC as well, which has no tag of ours.
      Sid      = "MakeSecurityGroupIn"
      Effect   = "Allow"
      Action   = ["ec2:CreateSecurityGroup"]
      Resource = ["${local.own}:vpc/*"]
    },
    {
      Sid       = "ChangeSecurityGroup"
      Effect    = "Allow"
      Action    = ["ec2:AuthorizeSecurityGroupIngress", "ec2:DeleteSecurityGroup"]
      Resource  = ["${local.own}:security-group/*"]
      Condition = local.built_by_packer
    },
    {
      Sid       = "RemoveKey"
      Effect    = "Allow"
      Action    = ["ec2:DeleteKeyPair"]
      Resource  = ["${local.own}:key-pair/packer_*"]
      Condition = local.built_by_packer
    },
    {
      Sid      = "LaunchFrom"
      Effect   = "Allow"
      Action   = ["ec2:RunInstances"]
      Resource = concat(["${local.ec2}::image/*", "${local.ec2}::snapshot/*", "${local.own}:network-interface/*"], local.subnets)
    },
    {
      Sid       = "LaunchWith"
      Effect    = "Allow"
      Action    = ["ec2:RunInstances"]
      Resource  = ["${local.own}:key-pair/packer_*", "${local.own}:security-group/*"]
      Condition = local.built_by_packer
    },
    {
      Sid      = "LaunchInstance"
      Effect   = "Allow"
      Action   = ["ec2:RunInstances"]
      Resource = ["${local.own}:instance/*"]
      Condition = merge(local.made_by_packer, {
        StringEquals = { "ec2:MetadataHttpTokens" = "required" }
      })
    },
    {
      Sid       = "LaunchVolume"
      Effect    = "Allow"
      Action    = ["ec2:RunInstances"]
      Resource  = ["${local.own}:volume/*"]
      Condition = { Bool = { "ec2:Encrypted" = "true" } }
    },
    {
      Sid       = "StopInstance"
      Effect    = "Allow"
      Action    = ["ec2:StopInstances", "ec2:TerminateInstances"]
      Resource  = ["${local.own}:instance/*"]
      Condition = local.built_by_packer
    },
    {
      Sid       = "ImageOfInstance"
      Effect    = "Allow"
      Action    = ["ec2:CreateImage"]
      Resource  = ["${local.own}:instance/*"]
      Condition = local.built_by_packer
    },
    {
      Sid       = "Image"
      Effect    = "Allow"
      Action    = ["ec2:CreateImage"]
      Resource  = ["${local.ec2}::image/*", "${local.ec2}::snapshot/*"]
      Condition = local.made_by_packer
    },
    {
      Sid    = "TagAtCreation"
      Effect = "Allow"
      Action = ["ec2:CreateTags"]
      Resource = [
        "${local.own}:instance/*",
        "${local.own}:key-pair/packer_*",
        "${local.own}:network-interface/*",
        "${local.own}:security-group/*",
        "${local.own}:volume/*",
        "${local.ec2}::image/*",
        "${local.ec2}::snapshot/*",
      ]
      Condition = {
        StringEquals = { "ec2:CreateAction" = ["CreateImage", "CreateKeyPair", "CreateSecurityGroup", "RunInstances"] }
      }
    },
    {
      Sid       = "TagImage"
      Effect    = "Allow"
      Action    = ["ec2:CreateTags"]
      Resource  = ["${local.ec2}::image/*", "${local.ec2}::snapshot/*"]
      Condition = local.built_by_packer
    },
    {
      # A build that is interrupted while its image is made removes it.
      Sid       = "RemoveImage"
      Effect    = "Allow"
      Action    = ["ec2:DeregisterImage", "ec2:DeleteSnapshot"]
      Resource  = ["${local.ec2}::image/*", "${local.ec2}::snapshot/*"]
      Condition = local.built_by_packer
    },
    ],
    [for it in local.bake_statements_kms : it if var.kms_key_arn != null],
    [for it in local.bake_statements_session : it if local.session_manager],
  )

  bake_statements_kms = [
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
  ]

  # For a build instance without a public address, which Packer reaches through Session Manager.
  bake_statements_session = [
    {
      Sid       = "GiveRole"
      Effect    = "Allow"
      Action    = ["iam:PassRole"]
      Resource  = [local.build_instance_role_arn]
      Condition = { StringEquals = { "iam:PassedToService" = "ec2.amazonaws.com" } }
    },
    {
      Sid      = "ReadInstanceProfile"
      Effect   = "Allow"
      Action   = ["iam:GetInstanceProfile"]
      Resource = ["arn:${local.partition}:iam::${local.account}:instance-profile/*"]
    },
    {
      Sid       = "ConnectToInstance"
      Effect    = "Allow"
      Action    = ["ssm:StartSession"]
      Resource  = ["${local.own}:instance/*"]
      Condition = { StringLike = { "ssm:resourceTag/Name" = "build of ${var.ami_name_prefix}-*" } }
    },
    {
      Sid      = "ForwardPort"
      Effect   = "Allow"
      Action   = ["ssm:StartSession"]
      Resource = ["arn:${local.partition}:ssm:${local.region}::document/AWS-StartPortForwardingSession"]
    },
    {
      Sid      = "EndOwnSession"
      Effect   = "Allow"
      Action   = ["ssm:TerminateSession"]
      Resource = ["arn:${local.partition}:ssm:${local.region}:${local.account}:session/$${aws:userid}-*"]
    },
  ]
}

resource "aws_iam_role_policy" "bake" {
  name   = "packer"
  role   = aws_iam_role.job["bake"].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.bake_statements })
}
