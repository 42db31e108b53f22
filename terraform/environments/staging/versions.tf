terraform {
  required_version = ">= 1.8"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 6.25"
    }
  }

  # Bucket and region come from backend.hcl (see backend.hcl.example). The lock is an object beside the state, which
  # Terraform knows since 1.10; `cargo xtask tf` asks for that version.
  backend "s3" {
    key          = "gpu-bringup/staging.tfstate"
    encrypt      = true
    use_lockfile = true
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = { "gpu-bringup.dev/environment" = "staging" }
  }
}
