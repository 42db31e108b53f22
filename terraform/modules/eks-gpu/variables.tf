variable "name" {
  description = "Name of the node group."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,38}[a-z0-9]$", var.name))
    error_message = "The name has 2 to 40 lowercase letters, digits and hyphens, starts with a letter and does not end with a hyphen."
  }
}

variable "cluster_name" {
  description = "The EKS cluster that the nodes join. It exists already; its endpoint, certificate and service range are read from it."
  type        = string

  validation {
    condition     = can(regex("^[0-9A-Za-z][0-9A-Za-z_-]{0,99}$", var.cluster_name))
    error_message = "A cluster's name has up to 100 letters, digits, hyphens and underscores."
  }
}

variable "ami_id" {
  description = "The validated image, as `cargo xtask ami publish` wrote it into its manifest."
  type        = string

  validation {
    condition     = can(regex("^ami-[0-9a-f]{8,17}$", var.ami_id))
    error_message = "An AMI's id looks like ami-0123456789abcdef0."
  }
}

variable "operating_system" {
  description = "How the image joins a cluster: al2023 (nodeadm) or ubuntu2204 (/etc/eks/bootstrap.sh)."
  type        = string
  default     = "al2023"

  validation {
    condition     = contains(["al2023", "ubuntu2204"], var.operating_system)
    error_message = "The operating system is al2023 or ubuntu2204."
  }
}

variable "instance_types" {
  description = "Instance types with NVIDIA GPUs, the preferred one first. Several only where they have the same number of EFA interfaces."
  type        = list(string)

  validation {
    condition = length(var.instance_types) > 0 && length(var.instance_types) <= 20 && alltrue([
      for type in var.instance_types : can(regex("^(g4dn|g5|g6|g6e|gr6|p3|p3dn|p4d|p4de|p5|p5e|p5en|p6-b200)\\.([0-9]*xlarge|metal)$", type))
    ])
    error_message = "Instance types are of the families g4dn, g5, g6, g6e, gr6, p3, p3dn, p4d, p4de, p5, p5e, p5en and p6-b200; 1 to 20 of them."
  }
}

variable "capacity_type" {
  description = "ON_DEMAND, SPOT, or CAPACITY_BLOCK (bought ahead of time; needs capacity_reservation_id)."
  type        = string
  default     = "ON_DEMAND"

  validation {
    condition     = contains(["ON_DEMAND", "SPOT", "CAPACITY_BLOCK"], var.capacity_type)
    error_message = "The capacity type is ON_DEMAND, SPOT or CAPACITY_BLOCK."
  }
}

variable "capacity_reservation_id" {
  description = "Capacity reservation or capacity block that the nodes run in; null runs them wherever there is capacity."
  type        = string
  default     = null

  validation {
    condition     = var.capacity_reservation_id == null || can(regex("^cr-[0-9a-f]{8,17}$", var.capacity_reservation_id))
    error_message = "A capacity reservation's id looks like cr-0123456789abcdef0."
  }
}

variable "subnet_ids" {
  description = "Private subnets of the cluster's VPC. In a placement group all nodes are in one availability zone, so exactly one."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) > 0 && alltrue([for id in var.subnet_ids : can(regex("^subnet-[0-9a-f]{8,17}$", id))])
    error_message = "At least one subnet is needed; its id looks like subnet-0123456789abcdef0."
  }
}

variable "scaling" {
  description = "Fewest and most nodes. The number in between is the autoscaler's: it is set when the group is made and then left alone."
  type = object({
    min_size     = optional(number, 0)
    max_size     = number
    desired_size = optional(number)
  })

  validation {
    condition = (
      var.scaling.min_size >= 0 && var.scaling.max_size >= 1 && var.scaling.min_size <= var.scaling.max_size &&
      alltrue([for size in [var.scaling.min_size, var.scaling.max_size] : floor(size) == size])
    )
    error_message = "min_size is a whole number from 0 to max_size, and max_size is at least 1."
  }

  validation {
    condition = var.scaling.desired_size == null ? true : (
      var.scaling.desired_size >= var.scaling.min_size && var.scaling.desired_size <= var.scaling.max_size
    )
    error_message = "desired_size is from min_size to max_size."
  }
}

variable "placement_group" {
  description = "Put the nodes close together: null does so for types from p4 on that have EFA, and not otherwise."
  type        = bool
  default     = null
}

variable "efa" {
  description = "Elastic Fabric Adapter on every network card that has it: null uses it where every type has it and a placement group is used."
  type        = bool
  default     = null
}

variable "root_volume_gib" {
  description = "Size of the encrypted root volume in GiB."
  type        = number
  default     = 100

  validation {
    condition     = var.root_volume_gib >= 50 && var.root_volume_gib <= 16384 && floor(var.root_volume_gib) == var.root_volume_gib
    error_message = "The root volume has 50 to 16384 GiB."
  }
}

variable "kms_key_arn" {
  description = "Key for the root volume; null takes the account's default key for EBS. Its policy must let the autoscaling service use it."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/", var.kms_key_arn))
    error_message = "A key's ARN looks like arn:aws:kms:eu-central-1:111122223333:key/…; an alias is not enough."
  }
}

variable "labels" {
  description = "More labels for the nodes, besides nvidia.com/gpu=true and role=gpu."
  type        = map(string)
  default     = {}

  validation {
    condition = alltrue([for key, value in var.labels :
      can(regex("^([a-z0-9.-]+/)?[0-9A-Za-z]([0-9A-Za-z._-]{0,61}[0-9A-Za-z])?$", key)) &&
      can(regex("^([0-9A-Za-z]([0-9A-Za-z._-]{0,61}[0-9A-Za-z])?)?$", value)) &&
      !contains(["nvidia.com/gpu", "role"], key) && !can(regex("^([^/]*\\.)?(kubernetes\\.io|k8s\\.io|eks\\.amazonaws\\.com)/", key))
    ])
    error_message = "Labels are Kubernetes labels; nvidia.com/gpu and role are taken, and EKS reserves kubernetes.io/, k8s.io/ and eks.amazonaws.com/."
  }
}

variable "register_unvalidated" {
  description = "Register nodes with the taint gpu-bringup.dev/unvalidated, which the gate (manifests/kubernetes) removes from those that pass; without a gate in the cluster nothing runs on them."
  type        = bool
  default     = true
}

variable "cni_uses_node_role" {
  description = "Let the VPC CNI use the nodes' role, as it does unless it has a role of its own (IRSA or Pod Identity); a node whose CNI has no rights never becomes ready."
  type        = bool
  default     = true
}

variable "withheld" {
  description = "What becomes of a node that does not pass at boot, beside a line on its console: power it off after so many hours unless it has passed, and publish to a topic of SNS."
  type = object({
    power_off_after_hours = optional(number)
    topic_arn             = optional(string)
  })
  default = {}

  validation {
    condition = var.withheld.power_off_after_hours == null ? true : (
      var.withheld.power_off_after_hours >= 1 && var.withheld.power_off_after_hours <= 168 && floor(var.withheld.power_off_after_hours) == var.withheld.power_off_after_hours
    )
    error_message = "power_off_after_hours is a whole number from 1 to 168."
  }

  validation {
    condition     = var.withheld.topic_arn == null || can(regex("^arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[0-9A-Za-z_-]{1,256}$", var.withheld.topic_arn))
    error_message = "A topic's ARN looks like arn:aws:sns:eu-central-1:111122223333:gpu-nodes."
  }
}

variable "additional_policy_arns" {
  description = "ARNs of more policies of your own for the nodes' role."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.additional_policy_arns : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:policy/", arn))])
    error_message = "Policies of your own are given by ARN, such as arn:aws:iam::111122223333:policy/nodes; AWS's by name in additional_managed_policies."
  }
}

variable "additional_managed_policies" {
  description = "Names of more AWS managed policies for the nodes' role, such as AmazonSSMManagedInstanceCore for shells on nodes."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for name in var.additional_managed_policies : can(regex("^Amazon[0-9A-Za-z_]+$", name))])
    error_message = "Managed policies are given by name, such as AmazonEKS_CNI_Policy."
  }
}

variable "permissions_boundary_arn" {
  description = "Permissions boundary for the nodes' role."
  type        = string
  default     = null

  validation {
    condition     = var.permissions_boundary_arn == null || can(regex("^arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/", var.permissions_boundary_arn))
    error_message = "A policy's ARN looks like arn:aws:iam::111122223333:policy/boundary."
  }
}

variable "tags" {
  description = "Tags for everything made here, the instances and their volumes included."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for key in keys(var.tags) : !startswith(key, "aws:")])
    error_message = "Tags that start with aws: are AWS's own."
  }
}
