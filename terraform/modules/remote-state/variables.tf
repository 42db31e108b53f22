variable "name" {
  description = "First part of the bucket's name; the account's number follows, because bucket names are global."
  type        = string
  default     = "gpu-bringup-terraform-state"

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,48}[a-z0-9]$", var.name))
    error_message = "The name has 3 to 50 lowercase letters, digits and hyphens, and no hyphen at its ends."
  }
}

variable "old_states_kept_days" {
  description = "How long a replaced state can be restored, in days."
  type        = number
  default     = 90

  validation {
    condition     = var.old_states_kept_days >= 7 && floor(var.old_states_kept_days) == var.old_states_kept_days
    error_message = "Old states are kept for at least 7 days."
  }
}

variable "kms_key_arn" {
  description = "Key for the state; null takes the account's default key for S3."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/", var.kms_key_arn))
    error_message = "A key's ARN looks like arn:aws:kms:eu-central-1:111122223333:key/…; an alias is not enough."
  }
}

variable "tags" {
  description = "Tags for the bucket."
  type        = map(string)
  default     = {}
}
