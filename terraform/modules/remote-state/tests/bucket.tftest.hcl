mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
}

run "the_state_is_private_encrypted_and_versioned" {
  command = plan

  assert {
    condition     = output.bucket == "gpu-bringup-terraform-state-111122223333"
    error_message = "the bucket's name is not unique to the account"
  }

  assert {
    condition     = aws_s3_bucket_versioning.state.versioning_configuration[0].status == "Enabled"
    error_message = "a broken state could not be taken back"
  }

  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.state.rule).apply_server_side_encryption_by_default).sse_algorithm == "aws:kms"
    error_message = "the state is not encrypted"
  }

  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.state.block_public_acls,
      aws_s3_bucket_public_access_block.state.block_public_policy,
      aws_s3_bucket_public_access_block.state.ignore_public_acls,
      aws_s3_bucket_public_access_block.state.restrict_public_buckets,
    ])
    error_message = "the state could be made public"
  }
}

run "the_only_wildcards_deny" {
  command = plan

  override_resource {
    target = aws_s3_bucket.state
    values = { id = "gpu-bringup-terraform-state-111122223333" }
  }

  assert {
    condition     = alltrue([for statement in jsondecode(aws_s3_bucket_policy.state.policy).Statement : statement.Effect == "Deny"])
    error_message = "the bucket's policy allows something"
  }

  assert {
    condition     = jsondecode(aws_s3_bucket_policy.state.policy).Statement[0].Condition.Bool["aws:SecureTransport"] == "false"
    error_message = "the state could travel in the clear"
  }
}

run "a_wrong_name_is_refused" {
  command = plan
  variables {
    name = "State_"
  }
  expect_failures = [var.name]
}

run "states_that_vanish_are_refused" {
  command = plan
  variables {
    old_states_kept_days = 0
  }
  expect_failures = [var.old_states_kept_days]
}

run "an_alias_of_a_key_is_refused" {
  command = plan
  variables {
    kms_key_arn = "alias/s3"
  }
  expect_failures = [var.kms_key_arn]
}
