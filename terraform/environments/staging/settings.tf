# Where a new image is tried: one small node group on spot capacity, scaled to nothing when no job waits.

locals {
  environment         = "staging"
  validation_instance = "validation-instance-staging"
  capacity_type       = "SPOT"
  max_size            = 2
}

terraform {
  # Bucket and region come from backend.hcl (see backend.hcl.example). The lock is an object next to the state, which
  # Terraform supports since 1.10; `cargo xtask tf` requires that version.
  backend "s3" {
    key          = "gpu-bringup/staging.tfstate"
    encrypt      = true
    use_lockfile = true
  }
}
