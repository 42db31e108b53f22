# What an instance type offers, as far as decisions here need it.
#
# EFA interfaces: one for each network card that has EFA, as karpenter-provider-aws v1.15.1 (2026-10-23) has them in
# pkg/providers/drametadata/zz_generated_efa_metadata.go, which it scraped. Types that are not
# named have none, but for p6-b300.48xlarge: its first of 17 cards is without EFA, and the launch template here begins with
# the first.

locals {
  efa_interfaces = {
    "g4dn.8xlarge"     = 1
    "g4dn.12xlarge"    = 1
    "g4dn.16xlarge"    = 1
    "g4dn.metal"       = 1
    "g5.8xlarge"       = 1
    "g5.12xlarge"      = 1
    "g5.16xlarge"      = 1
    "g5.24xlarge"      = 1
    "g5.48xlarge"      = 1
    "g6.8xlarge"       = 1
    "g6.12xlarge"      = 1
    "g6.16xlarge"      = 1
    "g6.24xlarge"      = 1
    "g6.48xlarge"      = 1
    "g6e.8xlarge"      = 1
    "g6e.12xlarge"     = 1
    "g6e.16xlarge"     = 1
    "g6e.24xlarge"     = 2
    "g6e.48xlarge"     = 4
    "gr6.8xlarge"      = 1
    "p3dn.24xlarge"    = 1
    "p4d.24xlarge"     = 4
    "p4de.24xlarge"    = 4
    "p5.4xlarge"       = 1
    "p5.48xlarge"      = 32
    "p5e.48xlarge"     = 32
    "p5en.48xlarge"    = 16
    "p6-b200.48xlarge" = 8
  }

  efa_counts = distinct([for type in var.instance_types : lookup(local.efa_interfaces, type, 0)])

  # Every type is one of whole boards joined by NVSwitch, which are worth joining by a fast network too.
  from_p4_on = alltrue([for type in var.instance_types : can(regex("^p([4-9]|[1-9][0-9])", type))])

  # A launch template states its network interfaces once, for all types.
  has_efa         = length(local.efa_counts) == 1 && local.efa_counts[0] > 0
  placement_group = coalesce(var.placement_group, local.from_p4_on && local.has_efa)
  efa             = coalesce(var.efa, local.placement_group && local.has_efa)
  efa_count       = local.efa ? max(local.efa_counts...) : 0
}
