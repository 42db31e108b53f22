mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_region" {
    defaults = { region = "eu-central-1" }
  }
  mock_resource "aws_iam_openid_connect_provider" {
    defaults = { arn = "arn:aws:iam::111122223333:oidc-provider/token.actions.githubusercontent.com" }
  }
}

variables {
  repository           = "octo-org/gpu-images"
  launcher_policy_arns = { eu-central-1 = "arn:aws:iam::111122223333:policy/gpu-bringup-validation-instance-launcher" }
}

run "a_role_is_assumed_by_one_environment_of_one_repository" {
  command = apply

  assert {
    condition = {
      for job, role in aws_iam_role.job : job => jsondecode(role.assume_role_policy).Statement[0].Condition
      } == {
      for job in ["bake", "validate", "publish"] : job => {
        StringEquals = {
          "token.actions.githubusercontent.com:aud" = "sts.amazonaws.com"
          "token.actions.githubusercontent.com:sub" = "repo:octo-org/gpu-images:environment:ami-${job}"
        }
      }
    }
    error_message = "a role is not bound to its environment"
  }

  assert {
    condition = alltrue([
      for role in aws_iam_role.job : jsondecode(role.assume_role_policy).Statement[0].Action == "sts:AssumeRoleWithWebIdentity"
      && jsondecode(role.assume_role_policy).Statement[0].Principal == { Federated = "arn:aws:iam::111122223333:oidc-provider/token.actions.githubusercontent.com" }
      && length(jsondecode(role.assume_role_policy).Statement) == 1
    ])
    error_message = "a role is assumed in another way than by GitHub's token"
  }

  assert {
    condition     = output.role_arns["ami-bake"] == aws_iam_role.job["bake"].arn && length(output.role_arns) == 3
    error_message = "the roles are not found by their environments"
  }

  # `role-duration-seconds` of the workflow; a job that takes longer loses its credentials.
  assert {
    condition     = aws_iam_role.job["bake"].max_session_duration == 7200 && aws_iam_role.job["validate"].max_session_duration == 7200 && aws_iam_role.job["publish"].max_session_duration == 3600
    error_message = "a session is not as long as the workflow's job"
  }
}

run "packer_gets_the_calls_that_it_makes" {
  command = apply

  # The calls of builder/ebs and of the steps that it lists, hashicorp/packer-plugin-amazon v1.8.2, for these templates.
  assert {
    condition = toset(flatten([for it in jsondecode(aws_iam_role_policy.bake.policy).Statement : it.Action])) == toset([
      "ec2:AuthorizeSecurityGroupIngress", # common/step_security_group.go
      "ec2:CreateImage",                   # builder/ebs/step_create_ami.go
      "ec2:CreateKeyPair",                 # common/step_key_pair.go
      "ec2:CreateSecurityGroup",
      "ec2:CreateTags", # common/step_create_tags.go, and every call with tags
      "ec2:DeleteKeyPair",
      "ec2:DeleteSecurityGroup",
      "ec2:DeleteSnapshot", # builder/ebs/step_create_ami.go, Cleanup
      "ec2:DeregisterImage",
      "ec2:DescribeImages", # common/step_source_ami_info.go, common/step_pre_validate.go
      "ec2:DescribeInstanceStatus",
      "ec2:DescribeInstanceTypeOfferings", # common/step_network_info.go
      "ec2:DescribeInstances",
      "ec2:DescribeRegions", # common/regions.go
      "ec2:DescribeSecurityGroups",
      "ec2:DescribeSnapshots",
      "ec2:DescribeSubnets",
      "ec2:DescribeVolumes", # common/step_cleanup_volumes.go
      "ec2:DescribeVpcs",
      "ec2:RunInstances",  # common/step_run_source_instance.go
      "ec2:StopInstances", # common/step_stop_ebs_instance.go
      "ec2:TerminateInstances",
    ])
    error_message = "the bake role has other rights than Packer's calls"
  }

  assert {
    condition = alltrue([
      for it in jsondecode(aws_iam_role_policy.bake.policy).Statement : it.Condition.StringLike["aws:ResourceTag/Name"] == "build of gpu-bringup-*"
      if contains(["ChangeSecurityGroup", "RemoveKey", "LaunchWith", "StopInstance", "ImageOfInstance", "TagImage", "RemoveImage"], it.Sid)
    ])
    error_message = "the bake role changes what Packer did not make"
  }

  assert {
    condition     = one([for it in jsondecode(aws_iam_role_policy.bake.policy).Statement : it.Condition if it.Sid == "LaunchInstance"]).StringEquals == { "ec2:MetadataHttpTokens" = "required" }
    error_message = "IMDSv1 is not ruled out"
  }
}

run "a_build_instance_without_a_public_address_is_reached_through_session_manager" {
  command = apply

  variables {
    session_manager = true
  }

  # The calls of builder/common/ssm/session.go and step_iam_instance_profile.go, hashicorp/packer-plugin-amazon at 5028903a.
  assert {
    condition = toset(flatten([
      for it in jsondecode(aws_iam_role_policy.bake.policy).Statement : it.Action if !startswith(it.Action[0], "ec2:")
    ])) == toset(["iam:GetInstanceProfile", "iam:PassRole", "ssm:StartSession", "ssm:TerminateSession"])
    error_message = "the bake role has other rights than Packer's calls for a session"
  }

  assert {
    condition     = one([for it in jsondecode(aws_iam_role_policy.bake.policy).Statement : it.Resource if it.Sid == "GiveRole"]) == [aws_iam_role.build_instance[0].arn]
    error_message = "another role than the build instance's can be passed"
  }

  assert {
    condition     = one([for it in jsondecode(aws_iam_role_policy.bake.policy).Statement : it.Condition.StringLike["ssm:resourceTag/Name"] if it.Sid == "ConnectToInstance"]) == "build of gpu-bringup-*"
    error_message = "sessions can be opened to other instances than Packer's"
  }

  assert {
    condition = toset(flatten([for it in jsondecode(aws_iam_role_policy.build_instance[0].policy).Statement : it.Action])) == toset([
      "ssm:UpdateInstanceInformation", "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
    ])
    error_message = "the build instance may do more than answer Systems Manager"
  }

  assert {
    condition     = output.build_instance_profile == aws_iam_role.build_instance[0].name
    error_message = "the instance profile is not found"
  }
}

run "no_session_can_be_opened_unless_it_is_asked_for" {
  command = apply

  assert {
    condition = output.build_instance_profile == null && length(aws_iam_role.build_instance) == 0 && alltrue([
      for it in jsondecode(aws_iam_role_policy.bake.policy).Statement : !startswith(it.Action[0], "ssm:") && !startswith(it.Action[0], "iam:")
    ])
    error_message = "the bake role can open sessions"
  }
}

run "the_accounts_own_role_of_build_instances_is_used" {
  command = apply

  variables {
    session_manager         = true
    build_instance_role_arn = "arn:aws:iam::111122223333:role/build"
  }

  assert {
    condition = length(aws_iam_role.build_instance) == 0 && one([
      for it in jsondecode(aws_iam_role_policy.bake.policy).Statement : it.Resource if it.Sid == "GiveRole"
    ]) == ["arn:aws:iam::111122223333:role/build"]
    error_message = "a second role is made"
  }
}

run "no_role_has_the_rights_of_another" {
  command = apply

  variables {
    share_with = ["444455556666"]
  }

  assert {
    condition = toset(flatten([for it in jsondecode(aws_iam_role_policy.publish.policy).Statement : it.Action])) == toset([
      "ec2:DescribeImages", "ec2:ModifyImageAttribute", "ec2:ModifySnapshotAttribute", "ssm:PutParameter",
    ])
    error_message = "the publish role has other rights than `cargo xtask ami publish` needs"
  }

  assert {
    condition = one([for it in jsondecode(aws_iam_role_policy.publish.policy).Statement : it.Condition if it.Sid == "Share"]).StringEquals == {
      "aws:ResourceTag/gpu-bringup.dev/verdict" = "pass"
      "ec2:Add/userId"                          = ["444455556666"]
    }
    error_message = "images can be shared with any account, or without a pass"
  }

  assert {
    condition     = one([for it in jsondecode(aws_iam_role_policy.publish.policy).Statement : it.Resource if it.Sid == "Publish"]) == ["arn:aws:ssm:eu-central-1:111122223333:parameter/gpu-bringup/ami/*"]
    error_message = "parameters of others can be written"
  }

  assert {
    condition     = aws_iam_role_policy_attachment.validate["eu-central-1"].role == "gpu-bringup-github-validate" && length(aws_iam_role_policy_attachment.validate) == 1
    error_message = "the launcher's policy is not the validating role's"
  }
}

run "nothing_is_shared_unless_accounts_are_named" {
  command = apply

  assert {
    condition     = !contains([for it in jsondecode(aws_iam_role_policy.publish.policy).Statement : it.Sid], "Share")
    error_message = "images can be shared without an account"
  }
}

run "no_action_has_a_wildcard_and_star_is_for_describing" {
  command = apply

  variables {
    kms_key_arn             = "arn:aws:kms:eu-central-1:111122223333:key/0"
    build_instance_role_arn = "arn:aws:iam::111122223333:role/build"
  }

  assert {
    condition = alltrue(flatten([
      for policy in [aws_iam_role_policy.bake.policy, aws_iam_role_policy.publish.policy] : [
        for it in jsondecode(policy).Statement : [
          for action in it.Action : !strcontains(action, "*") && (!contains(it.Resource, "*") || startswith(action, "ec2:Describe"))
        ]
      ]
    ]))
    error_message = "an action has a wildcard, or every resource"
  }

  assert {
    condition     = one([for it in jsondecode(aws_iam_role_policy.bake.policy).Statement : it.Resource if it.Sid == "GiveRole"]) == ["arn:aws:iam::111122223333:role/build"]
    error_message = "another role than the build instance's can be passed"
  }
}

run "the_accounts_own_provider_is_used" {
  command = apply

  variables {
    oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/token.actions.githubusercontent.com"
  }

  assert {
    condition     = length(aws_iam_openid_connect_provider.github) == 0 && output.oidc_provider_arn == var.oidc_provider_arn
    error_message = "a second provider for the same issuer is refused by IAM"
  }
}

run "a_wildcard_in_the_repository_is_refused" {
  command = plan

  variables {
    repository = "octo-org/*"
  }

  expect_failures = [var.repository]
}

run "one_environment_for_two_jobs_is_refused" {
  command = plan

  variables {
    environments = { bake = "ami", publish = "ami" }
  }

  expect_failures = [var.environments]
}

run "an_environment_with_a_wildcard_is_refused" {
  command = plan

  variables {
    environments = { bake = "*" }
  }

  expect_failures = [var.environments]
}
