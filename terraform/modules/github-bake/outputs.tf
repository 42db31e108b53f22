output "role_arns" {
  description = "Variable AWS_ROLE_ARN of each environment, by the environment's name."
  value       = { for job, role in local.roles : role.environment => aws_iam_role.job[job].arn }
}

output "build_instance_profile" {
  description = "The templates' variable iam_instance_profile (the environment's variable BAKE_INSTANCE_PROFILE); null where none is made here."
  value       = one(aws_iam_instance_profile.build_instance[*].name)
}

output "oidc_provider_arn" {
  description = "The account's provider for GitHub's tokens, for other modules."
  value       = local.provider_arn
}
