output "foundation" {
  description = "For cargo xtask validate-ami --foundation."
  value       = module.validation_instance.parameter_name
}

output "launcher_policy_arn" {
  description = "Attach it to whoever runs cargo xtask validate-ami --ami."
  value       = module.validation_instance.launcher_policy_arn
}

output "node_groups" {
  description = "What pods and pipelines need to know of each node group."
  value = {
    for name, group in module.node_group : name => {
      labels               = group.labels
      toleration           = group.toleration
      startup_taint        = group.startup_taint
      efa_interfaces       = group.efa_interfaces
      node_role_arn        = group.node_role_arn
      node_role_policies   = group.node_role_policies
      placement_group_name = group.placement_group_name
    }
  }
}
