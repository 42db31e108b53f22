# The bucket that holds the state of the other environments. Its own state stays beside this file: it holds no secret, and
# there is nowhere else to put it yet.

terraform {
  required_version = ">= 1.8"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 6.25"
    }
  }
}

provider "aws" {
  region = var.region
}

variable "region" {
  description = "Region of the bucket."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "A region looks like eu-central-1."
  }
}

module "remote_state" {
  source = "../../modules/remote-state"
}

output "bucket" {
  description = "For backend.hcl of the other environments."
  value       = module.remote_state.bucket
}
