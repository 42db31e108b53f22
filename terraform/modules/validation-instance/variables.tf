variable "name" {
  description = "Name of everything here, and of the SSM parameter that `cargo xtask validate-ami` reads: /gpu-bringup/<name>."
  type        = string
  default     = "validation-instance"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,39}$", var.name))
    error_message = "The name has 3 to 40 lowercase letters, digits and hyphens, and starts with a letter."
  }
}

variable "vpc_id" {
  description = "VPC of the subnets."
  type        = string

  validation {
    condition     = can(regex("^vpc-[0-9a-f]{8,17}$", var.vpc_id))
    error_message = "A VPC's id looks like vpc-0123456789abcdef0."
  }
}

variable "subnet_ids" {
  description = "Private subnets that instances are launched in, tried in this order when one has no capacity. They need a way to Systems Manager: NAT, or the interface endpoints ssm, ssmmessages and ec2messages."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) > 0 && alltrue([for id in var.subnet_ids : can(regex("^subnet-[0-9a-f]{8,17}$", id))])
    error_message = "At least one subnet is needed; its id looks like subnet-0123456789abcdef0."
  }
}

variable "egress_cidr_ipv4" {
  description = "Where instances may open HTTPS connections to. With interface endpoints the VPC's own range is enough."
  type        = string
  default     = "0.0.0.0/0"

  validation {
    condition     = can(cidrnetmask(var.egress_cidr_ipv4))
    error_message = "An IPv4 range looks like 10.0.0.0/16."
  }
}

variable "kms_key_arn" {
  description = "Key for the root volume; null takes the account's default key for EBS."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/", var.kms_key_arn))
    error_message = "A key's ARN looks like arn:aws:kms:eu-central-1:111122223333:key/…; an alias is not enough."
  }
}

variable "permissions_boundary_arn" {
  description = "Permissions boundary for every role made here."
  type        = string
  default     = null

  validation {
    condition     = var.permissions_boundary_arn == null || can(regex("^arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/", var.permissions_boundary_arn))
    error_message = "A policy's ARN looks like arn:aws:iam::111122223333:policy/boundary."
  }
}

variable "tags" {
  description = "Tags for everything made here."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for key in keys(var.tags) : !startswith(key, "gpu-bringup.dev/") && !startswith(key, "aws:")])
    error_message = "Tags that start with gpu-bringup.dev/ or aws: have a meaning and are not set by hand."
  }
}
