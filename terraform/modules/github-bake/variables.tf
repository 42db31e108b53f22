variable "repository" {
  description = "The repository whose workflow bakes, as owner/name: the beginning of the subject in GitHub's tokens. An organization that customized its subject claims names it as they have it, such as owner@id/name@id."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z0-9_.@-]+/[A-Za-z0-9_.@-]+$", var.repository))
    error_message = "A repository is named owner/name, without a wildcard."
  }
}

variable "environments" {
  description = "The environments of the repository that the workflow's jobs run in."
  type = object({
    bake     = optional(string, "ami-bake")
    validate = optional(string, "ami-validate")
    publish  = optional(string, "ami-publish")
  })
  default = {}

  validation {
    condition     = length(distinct(values(var.environments))) == 3
    error_message = "Each job needs an environment of its own: one environment would let each job assume every role."
  }

  validation {
    condition     = alltrue([for name in values(var.environments) : can(regex("^[A-Za-z0-9_.-]+$", name))])
    error_message = "An environment's name has letters, digits, dots, hyphens and underscores here, and no wildcard."
  }
}

variable "oidc_issuer" {
  description = "Who issues the tokens, without https://. GitHub Enterprise Server has HOSTNAME/_services/token."
  type        = string
  default     = "token.actions.githubusercontent.com"

  validation {
    condition     = can(regex("^[a-z0-9.-]+(/[A-Za-z0-9_./-]+)?$", var.oidc_issuer))
    error_message = "The issuer is a host and a path, such as token.actions.githubusercontent.com."
  }
}

variable "oidc_provider_arn" {
  description = "The account's provider of that issuer where there is one (an account can have only one); null makes it."
  type        = string
  default     = null

  validation {
    condition     = var.oidc_provider_arn == null || can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:oidc-provider/", var.oidc_provider_arn))
    error_message = "A provider's ARN looks like arn:aws:iam::111122223333:oidc-provider/token.actions.githubusercontent.com."
  }
}

variable "launcher_policy_arns" {
  description = "For the job that validates: output launcher_policy_arn of module validation-instance, by any name."
  type        = map(string)
}

variable "name" {
  description = "Beginning of the roles' names."
  type        = string
  default     = "gpu-bringup-github"

  # A role's name has 64 characters at most, `-validate` included.
  validation {
    condition     = can(regex("^[A-Za-z][A-Za-z0-9-]{2,54}$", var.name))
    error_message = "The name has 3 to 55 letters, digits and hyphens, and starts with a letter."
  }
}

variable "ami_name_prefix" {
  description = "The templates' variable of the same name."
  type        = string
  default     = "gpu-bringup"

  validation {
    condition     = can(regex("^[0-9A-Za-z()./_-]{3,48}$", var.ami_name_prefix))
    error_message = "The ami_name_prefix has 3 to 48 letters, digits and ( ) . / - _ only."
  }
}

variable "subnet_ids" {
  description = "Subnets that build instances may be launched in; empty allows every subnet of the account."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for id in var.subnet_ids : can(regex("^subnet-[0-9a-f]{8,17}$", id))])
    error_message = "A subnet's id looks like subnet-0123456789abcdef0."
  }
}

variable "kms_key_arn" {
  description = "Key of the images where it is not the account's default key for EBS."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/", var.kms_key_arn))
    error_message = "A key's ARN looks like arn:aws:kms:eu-central-1:111122223333:key/…; an alias is not enough."
  }
}

variable "session_manager" {
  description = "Build instances without a public address are reached through Session Manager (the templates' ssh_interface = session_manager): makes their role and instance profile, and lets the job that bakes open sessions to them."
  type        = bool
  default     = false
}

variable "build_instance_role_arn" {
  description = "The account's own role of build instances that are reached through Session Manager, in place of one that is made here; its instance profile is the account's, too."
  type        = string
  default     = null

  validation {
    condition     = var.build_instance_role_arn == null || can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:role/", var.build_instance_role_arn))
    error_message = "A role's ARN looks like arn:aws:iam::111122223333:role/build."
  }
}

variable "share_with" {
  description = "Accounts that images may be shared with (`cargo xtask ami publish --share-with`)."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for account in var.share_with : can(regex("^[0-9]{12}$", account))])
    error_message = "An AWS account has 12 digits."
  }
}

variable "parameter_path" {
  description = "Parameters below this path get the ids of published images."
  type        = string
  default     = "/gpu-bringup/ami"

  validation {
    condition     = can(regex("^(/[A-Za-z0-9_.-]+)+$", var.parameter_path))
    error_message = "A parameter's path looks like /gpu-bringup/ami."
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
}
