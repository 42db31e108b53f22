variable "region" {
  description = "Region of cluster, images and instances."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "A region looks like eu-central-1."
  }
}

variable "cluster_name" {
  description = "EKS cluster that the node groups join."
  type        = string
}

variable "vpc_id" {
  description = "VPC for instances that validate an AMI."
  type        = string
}

variable "private_subnet_ids" {
  description = "Private subnets of that VPC, one for each availability zone that may be used."
  type        = list(string)
}

variable "ami_id" {
  description = "The validated image for all node groups here."
  type        = string
}

variable "node_groups" {
  description = "Node groups by name; what is left out is as in settings.tf and modules/eks-gpu."
  type = map(object({
    instance_types          = list(string)
    max_size                = optional(number)
    min_size                = optional(number, 0)
    desired_size            = optional(number)
    subnet_ids              = optional(list(string))
    operating_system        = optional(string, "al2023")
    capacity_type           = optional(string)
    capacity_reservation_id = optional(string)
    placement_group         = optional(bool)
    efa                     = optional(bool)
    root_volume_gib         = optional(number, 100)
    labels                  = optional(map(string), {})
  }))
  default = {
    g5 = { instance_types = ["g5.xlarge", "g5.2xlarge"] }
  }
}

variable "register_unvalidated" {
  description = "Nodes register with the taint that the gate removes; see modules/eks-gpu. False only in a cluster without the gate."
  type        = bool
  default     = true
}

variable "cni_uses_node_role" {
  description = "The VPC CNI uses the nodes' role; false where it has one of its own (IRSA or Pod Identity)."
  type        = bool
  default     = true
}

variable "withheld" {
  description = "What becomes of a node that does not pass at boot; see modules/eks-gpu."
  type = object({
    power_off_after_hours = optional(number)
    topic_arn             = optional(string)
  })
  default = {}
}

variable "additional_managed_policies" {
  description = "Names of more AWS managed policies for the nodes' role, such as AmazonSSMManagedInstanceCore."
  type        = set(string)
  default     = []
}

variable "additional_policy_arns" {
  description = "ARNs of more policies of your own for the nodes' role."
  type        = set(string)
  default     = []
}

variable "kms_key_arn" {
  description = "Key for root volumes, of nodes and of instances that validate an AMI; null takes the account's default key for EBS."
  type        = string
  default     = null
}

variable "permissions_boundary_arn" {
  description = "Permissions boundary for every role made here."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags for everything made here, the instances and their volumes included."
  type        = map(string)
  default     = {}
}
