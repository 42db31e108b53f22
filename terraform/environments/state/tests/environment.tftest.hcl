mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
}

run "the_bucket_is_named_for_the_other_environments" {
  command = plan

  variables {
    region = "eu-central-1"
  }

  assert {
    condition     = output.bucket == "gpu-bringup-terraform-state-111122223333"
    error_message = "backend.hcl needs the bucket's name"
  }
}

run "a_zone_is_not_a_region" {
  command = plan

  variables {
    region = "eu-central-1a"
  }

  expect_failures = [var.region]
}
