# What `cargo xtask ami publish` calls: it shares an image with accounts that are listed here, and writes its id to a parameter.

locals {
  publish_statements = concat([
    {
      # Describing knows no resources; AWS accepts only "*" here. Systems Manager calls it as well, for parameters of type aws:ec2:image.
      Sid       = "Describe"
      Effect    = "Allow"
      Action    = ["ec2:DescribeImages"]
      Resource  = ["*"]
      Condition = { StringEquals = { "aws:RequestedRegion" = local.region } }
    },
    {
      Sid      = "Publish"
      Effect   = "Allow"
      Action   = ["ssm:PutParameter"]
      Resource = ["arn:${local.partition}:ssm:${local.region}:${local.account}:parameter${var.parameter_path}/*"]
    },
    ],
    [for it in local.publish_statements_share : it if length(var.share_with) > 0],
  )

  publish_statements_share = [
    {
      Sid      = "Share"
      Effect   = "Allow"
      Action   = ["ec2:ModifyImageAttribute", "ec2:ModifySnapshotAttribute"]
      Resource = ["${local.ec2}::image/*", "${local.ec2}::snapshot/*"]
      Condition = {
        StringEquals = {
          "aws:ResourceTag/gpu-bringup.dev/verdict" = "pass"
          "ec2:Add/userId"                          = var.share_with
        }
      }
    },
  ]
}

resource "aws_iam_role_policy" "publish" {
  name   = "publish"
  role   = aws_iam_role.job["publish"].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.publish_statements })
}
