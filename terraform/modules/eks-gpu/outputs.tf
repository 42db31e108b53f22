output "node_group_name" {
  description = "Name of the node group, for the label selector eks.amazonaws.com/nodegroup."
  value       = aws_eks_node_group.this.node_group_name
}

output "node_role_arn" {
  description = "Role of the nodes; with authentication mode API it needs an access entry of type EC2_LINUX, which EKS makes by itself for managed node groups."
  value       = aws_iam_role.node.arn
}

output "node_role_policies" {
  description = "Policies of that role: names of AWS's, ARNs of your own."
  value = setunion(
    keys(aws_iam_role_policy_attachment.node),
    keys(aws_iam_role_policy_attachment.additional),
  )
}

output "labels" {
  description = "Labels of the nodes, for node selectors."
  value       = local.labels
}

output "toleration" {
  description = "What a pod tolerates to run on the nodes."
  value       = { key = local.taint.key, operator = "Equal", value = local.taint.value, effect = "NoSchedule" }
}

output "startup_taint" {
  description = "Taint that nodes register with until the gate has validated them, or null: cluster-autoscaler needs --startup-taint=KEY for it."
  value       = var.register_unvalidated ? local.startup_taint : null
}

output "efa_interfaces" {
  description = "EFA interfaces of a node, which the EFA device plugin offers as vpc.amazonaws.com/efa; 0 without EFA."
  value       = local.efa_count
}

output "placement_group_name" {
  description = "Placement group of the nodes, or null."
  value       = one(aws_placement_group.this[*].name)
}
