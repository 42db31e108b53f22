# Where jobs run: on demand, because an interrupted job costs more than the discount.

locals {
  environment         = "production"
  validation_instance = "validation-instance"
  capacity_type       = "ON_DEMAND"
  max_size            = 8
}

terraform {
  # Bucket and region come from backend.hcl (see backend.hcl.example). The lock is an object next to the state, which
  # Terraform supports since 1.10; `cargo xtask tf` requires that version.
  backend "s3" {
    key          = "gpu-bringup/production.tfstate"
    encrypt      = true
    use_lockfile = true
  }
}
