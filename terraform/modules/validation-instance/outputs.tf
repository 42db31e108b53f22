output "parameter_name" {
  description = "For cargo xtask validate-ami --foundation."
  value       = aws_ssm_parameter.foundation.name
}

output "launcher_policy_arn" {
  description = "Attach it to the role or group of whoever runs cargo xtask validate-ami --ami, such as the role of bake-ami.yml."
  value       = aws_iam_policy.launcher.arn
}

output "security_group_id" {
  description = "Security group of the instances; add it to those of the interface endpoints that they use."
  value       = aws_security_group.instance.id
}

output "instance_role_arn" {
  description = "Role of the instances; a customer-managed KMS key for Session Manager must name it."
  value       = aws_iam_role.instance.arn
}
