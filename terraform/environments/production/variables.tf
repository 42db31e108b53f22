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
  description = "Node groups by name; what is left out is as in modules/eks-gpu."
  type = map(object({
    instance_types          = list(string)
    max_size                = number
    min_size                = optional(number, 0)
    desired_size            = optional(number)
    subnet_ids              = optional(list(string))
    operating_system        = optional(string, "al2023")
    capacity_type           = optional(string, "ON_DEMAND")
    capacity_reservation_id = optional(string)
    placement_group         = optional(bool)
    efa                     = optional(bool)
    root_volume_gib         = optional(number, 100)
    labels                  = optional(map(string), {})
  }))
  default = {
    g5 = { instance_types = ["g5.xlarge", "g5.2xlarge"], max_size = 8 }
  }
}
