# The environments differ in settings.tf alone; the other files of staging are links to those of production.

module "validation_instance" {
  source = "../../modules/validation-instance"

  name       = local.validation_instance
  vpc_id     = var.vpc_id
  subnet_ids = var.private_subnet_ids

  kms_key_arn              = var.kms_key_arn
  permissions_boundary_arn = var.permissions_boundary_arn
  tags                     = var.tags
}

module "node_group" {
  source   = "../../modules/eks-gpu"
  for_each = var.node_groups

  name                    = each.key
  cluster_name            = var.cluster_name
  ami_id                  = var.ami_id
  operating_system        = each.value.operating_system
  instance_types          = each.value.instance_types
  capacity_type           = coalesce(each.value.capacity_type, local.capacity_type)
  capacity_reservation_id = each.value.capacity_reservation_id
  subnet_ids              = coalesce(each.value.subnet_ids, var.private_subnet_ids)
  scaling = {
    min_size     = each.value.min_size
    max_size     = coalesce(each.value.max_size, local.max_size)
    desired_size = each.value.desired_size
  }
  placement_group = each.value.placement_group
  efa             = each.value.efa
  root_volume_gib = each.value.root_volume_gib
  labels          = each.value.labels

  register_unvalidated        = var.register_unvalidated
  cni_uses_node_role          = var.cni_uses_node_role
  withheld                    = var.withheld
  additional_managed_policies = var.additional_managed_policies
  additional_policy_arns      = var.additional_policy_arns
  kms_key_arn                 = var.kms_key_arn
  permissions_boundary_arn    = var.permissions_boundary_arn
  tags                        = var.tags
}
