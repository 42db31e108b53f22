# What the workflow `bake-ami.yml` needs in an account: trust in GitHub's tokens, and a role for each of its jobs. A role can be
# assumed by jobs of one repository that run in one environment of it, so that GitHub's protection rules of the environment
# (branches, reviewers) decide who gets it. No job has the rights of another: the one that bakes cannot publish.

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.region
  ec2       = "arn:${local.partition}:ec2:${local.region}"

  provider_arn = var.oidc_provider_arn != null ? var.oidc_provider_arn : aws_iam_openid_connect_provider.github[0].arn

  roles = {
    bake     = { environment = var.environments.bake, seconds = 7200, description = "Bakes images with Packer" }
    validate = { environment = var.environments.validate, seconds = 7200, description = "Validates images on instances of their own" }
    publish  = { environment = var.environments.publish, seconds = 3600, description = "Lets deployments find images" }
  }
}

resource "aws_iam_openid_connect_provider" "github" {
  count = var.oidc_provider_arn == null ? 1 : 0

  url            = "https://${var.oidc_issuer}"
  client_id_list = [local.audience]
  tags           = var.tags
}

locals {
  # The audience that aws-actions/configure-aws-credentials requests.
  audience = "sts.amazonaws.com"
}

resource "aws_iam_role" "job" {
  for_each = local.roles

  name                 = "${var.name}-${each.key}"
  description          = each.value.description
  max_session_duration = each.value.seconds
  permissions_boundary = var.permissions_boundary_arn
  tags                 = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRoleWithWebIdentity"
      Principal = { Federated = local.provider_arn }
      # Equality, without a wildcard: `repo:owner/name:*` would let every branch and pull request in.
      Condition = {
        StringEquals = {
          "${var.oidc_issuer}:aud" = local.audience
          "${var.oidc_issuer}:sub" = "repo:${var.repository}:environment:${each.value.environment}"
        }
      }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "validate" {
  for_each = var.launcher_policy_arns

  role       = aws_iam_role.job["validate"].name
  policy_arn = each.value
}
