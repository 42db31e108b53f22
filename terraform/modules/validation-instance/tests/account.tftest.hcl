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
}

variables {
  vpc_id     = "vpc-0123456789abcdef0"
  subnet_ids = ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]
}

run "nothing_reaches_an_instance" {
  command = apply

  assert {
    condition     = aws_vpc_security_group_egress_rule.https.ip_protocol == "tcp" && aws_vpc_security_group_egress_rule.https.from_port == 443 && aws_vpc_security_group_egress_rule.https.to_port == 443
    error_message = "instances may open HTTPS connections and nothing else"
  }

  assert {
    condition     = length(aws_security_group.instance.ingress) == 0
    error_message = "the security group lets something in"
  }

  assert {
    condition     = aws_iam_role.instance.max_session_duration == 3600
    error_message = "the instance's role is not short-lived"
  }
}

run "the_command_line_finds_what_it_needs" {
  command = apply

  assert {
    condition     = output.parameter_name == "/gpu-bringup/validation-instance"
    error_message = "cargo xtask validate-ami looks for /gpu-bringup/validation-instance"
  }

  assert {
    condition     = jsonencode(jsondecode(aws_ssm_parameter.foundation.value).subnet_ids) == jsonencode(var.subnet_ids)
    error_message = "the subnets are not in the order that was given"
  }

  assert {
    condition     = jsondecode(aws_ssm_parameter.foundation.value).instance_profile_name == "gpu-bringup-validation-instance"
    error_message = "the instance profile is missing"
  }
}

run "no_policy_has_a_wildcard_action_and_star_only_where_aws_knows_no_resources" {
  command = apply

  assert {
    condition = alltrue(flatten([
      for policy in [aws_iam_role_policy.instance.policy, aws_iam_role_policy.sweeper.policy, aws_iam_role_policy.schedule.policy, aws_iam_policy.launcher.policy] : [
        for statement in jsondecode(policy).Statement : [
          for action in flatten([statement.Action]) : !strcontains(action, "*")
        ]
      ]
    ]))
    error_message = "an action has a wildcard"
  }

  # An instance of others may have a deadline tag; the state machine reads that tag alone.
  assert {
    condition = alltrue([
      for statement in jsondecode(aws_iam_role_policy.sweeper.policy).Statement :
      strcontains(jsonencode(try(statement.Condition, {})), "aws:ResourceTag/gpu-bringup.dev/validate-ami")
      if contains(flatten([statement.Action]), "ec2:TerminateInstances")
    ])
    error_message = "the sweeper's role can terminate instances that were not launched by validate-ami"
  }

  assert {
    condition = alltrue(flatten([
      for policy in [aws_iam_role_policy.instance.policy, aws_iam_role_policy.sweeper.policy, aws_iam_role_policy.schedule.policy, aws_iam_policy.launcher.policy] : [
        for statement in jsondecode(policy).Statement : [
          for action in flatten([statement.Action]) : contains([
            "ec2:DescribeImages", "ec2:DescribeInstances", "ec2:DescribeTags", "ec2:DescribeVolumes",
            "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
            "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
          ], action)
        ] if contains(flatten([statement.Resource]), "*")
      ]
    ]))
    error_message = "a statement for every resource has an action that knows resources"
  }
}

run "an_instance_without_imdsv2_our_role_or_tags_cannot_be_launched" {
  command = apply

  assert {
    condition = one([
      for statement in jsondecode(aws_iam_policy.launcher.policy).Statement : statement.Condition if statement.Sid == "LaunchInstance"
      ]).StringEquals == {
      "ec2:MetadataHttpTokens" = "required"
    }
    error_message = "IMDSv1 is not ruled out"
  }

  assert {
    condition = toset(keys(one([
      for statement in jsondecode(aws_iam_policy.launcher.policy).Statement : statement.Condition if statement.Sid == "LaunchInstance"
    ]).StringLike)) == toset(["aws:RequestTag/gpu-bringup.dev/validate-ami", "aws:RequestTag/gpu-bringup.dev/terminate-after"])
    error_message = "an instance could be launched that the sweeper does not find"
  }

  assert {
    condition = one([
      for statement in jsondecode(aws_iam_policy.launcher.policy).Statement : statement.Condition if statement.Sid == "LaunchVolume"
    ]).Bool["ec2:Encrypted"] == "true"
    error_message = "a volume could be launched unencrypted"
  }

  assert {
    condition = alltrue([
      for statement in jsondecode(aws_iam_policy.launcher.policy).Statement : can(statement.Condition.StringLike["aws:ResourceTag/gpu-bringup.dev/validate-ami"])
      if contains(statement.Action, "ec2:TerminateInstances") || contains(statement.Action, "ec2:DeleteVolume")
    ])
    error_message = "instances of others could be ended"
  }
}

run "the_sweeper_does_not_need_our_process" {
  command = apply

  assert {
    condition     = aws_scheduler_schedule.sweeper.schedule_expression == "rate(10 minutes)" && aws_scheduler_schedule.sweeper.target[0].arn == aws_sfn_state_machine.sweeper.arn
    error_message = "nothing starts the sweeper"
  }

  assert {
    condition     = strcontains(aws_scheduler_schedule.sweeper.target[0].input, "<aws.scheduler.scheduled-time>")
    error_message = "the scheduler does not find where the time goes"
  }

  assert {
    condition     = jsondecode(aws_sfn_state_machine.sweeper.definition).States.EachInstance.ItemProcessor.States.IsBeforeDeadline.Default == "Terminate"
    error_message = "an instance without a readable deadline lives for ever"
  }

  # AWS Step Functions Developer Guide, "Service quotas": input and output of a state have at most 256 KiB. A described instance has
  # several, with 32 network interfaces tens of them; a tag has less than 512 bytes.
  assert {
    condition     = !strcontains(aws_sfn_state_machine.sweeper.definition, "describeInstances") && alltrue([for state in ["FindInstances", "FindMore"] : jsondecode(aws_sfn_state_machine.sweeper.definition).States[state].Parameters.MaxResults * 512 <= 256 * 1024])
    error_message = "the instances of a large account do not fit into a state"
  }

  assert {
    condition     = jsondecode(aws_sfn_state_machine.sweeper.definition).States.AreThereMore.Choices[0].Next == "FindMore" && jsondecode(aws_sfn_state_machine.sweeper.definition).States.FindMore.Parameters["NextToken.$"] == "$.found.NextToken"
    error_message = "instances beyond the first page are never found"
  }
}

run "a_key_is_used_and_allowed" {
  command = apply

  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
  }

  assert {
    condition     = jsondecode(aws_ssm_parameter.foundation.value).kms_key_arn == var.kms_key_arn
    error_message = "the key is not told to cargo xtask validate-ami"
  }

  assert {
    condition = alltrue([
      for statement in jsondecode(aws_iam_policy.launcher.policy).Statement : statement.Resource == [var.kms_key_arn]
      if startswith(statement.Action[0], "kms:")
    ])
    error_message = "other keys could be used"
  }
}

run "a_wrong_name_is_refused" {
  command = plan
  variables {
    name = "Validation Instance"
  }
  expect_failures = [var.name]
}

run "a_wrong_vpc_is_refused" {
  command = plan
  variables {
    vpc_id = "10.0.0.0/16"
  }
  expect_failures = [var.vpc_id]
}

run "no_subnet_is_refused" {
  command = plan
  variables {
    subnet_ids = []
  }
  expect_failures = [var.subnet_ids]
}

run "a_wrong_subnet_is_refused" {
  command = plan
  variables {
    subnet_ids = ["eu-central-1a"]
  }
  expect_failures = [var.subnet_ids]
}

run "a_wrong_range_is_refused" {
  command = plan
  variables {
    egress_cidr_ipv4 = "everywhere"
  }
  expect_failures = [var.egress_cidr_ipv4]
}

run "an_alias_of_a_key_is_refused" {
  command = plan
  variables {
    kms_key_arn = "alias/ebs"
  }
  expect_failures = [var.kms_key_arn]
}

run "a_wrong_boundary_is_refused" {
  command = plan
  variables {
    permissions_boundary_arn = "boundary"
  }
  expect_failures = [var.permissions_boundary_arn]
}

run "our_own_tags_are_not_set_by_hand" {
  command = plan
  variables {
    tags = { "gpu-bringup.dev/validate-ami" = "always" }
  }
  expect_failures = [var.tags]
}
