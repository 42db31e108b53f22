# Ends what is past its deadline, whatever became of the process that launched it and of the instance's own timer (an AMI
# that does not boot has none). A state machine of two calls needs no code to be deployed and no machine to run on.

locals {
  sweeper = {
    Comment = "Terminates instances of cargo xtask validate-ami that are past their deadline"
    StartAt = "FindInstances"
    States = {
      FindInstances = {
        Type     = "Task"
        Resource = "arn:${local.partition}:states:::aws-sdk:ec2:describeInstances"
        Parameters = {
          Filters = [
            { Name = "tag-key", Values = [local.run_tag] },
            { Name = "instance-state-name", Values = ["pending", "running", "stopping", "stopped"] },
          ]
        }
        ResultSelector = { "instances.$" = "$.Reservations[*].Instances[*]" }
        Retry          = [{ ErrorEquals = ["States.ALL"], IntervalSeconds = 5, MaxAttempts = 3, BackoffRate = 2 }]
        Next           = "EachInstance"
      }
      EachInstance = {
        Type      = "Map"
        ItemsPath = "$.instances"
        ItemSelector = {
          "instance.$" = "$$.Map.Item.Value.InstanceId"
          "deadline.$" = "$$.Map.Item.Value.Tags[?(@.Key=='${local.deadline_tag}')].Value"
          "now.$"      = "$$.State.EnteredTime"
        }
        ItemProcessor = {
          ProcessorConfig = { Mode = "INLINE" }
          StartAt         = "IsBeforeDeadline"
          States = {
            # A deadline that is missing or cannot be read counts as passed: forgotten instances cost more than ended ones.
            IsBeforeDeadline = {
              Type = "Choice"
              Choices = [{
                And = [
                  { Variable = "$.deadline[0]", IsPresent = true },
                  { Variable = "$.deadline[0]", IsTimestamp = true },
                  { Variable = "$.deadline[0]", TimestampGreaterThanPath = "$.now" },
                ]
                Next = "Keep"
              }]
              Default = "Terminate"
            }
            Keep = { Type = "Succeed" }
            Terminate = {
              Type       = "Task"
              Resource   = "arn:${local.partition}:states:::aws-sdk:ec2:terminateInstances"
              Parameters = { "InstanceIds.$" = "States.Array($.instance)" }
              Retry      = [{ ErrorEquals = ["States.ALL"], IntervalSeconds = 5, MaxAttempts = 3, BackoffRate = 2 }]
              End        = true
            }
          }
        }
        End = true
      }
    }
  }
}

resource "aws_iam_role" "sweeper" {
  name                 = "gpu-bringup-${var.name}-sweeper"
  description          = "The state machine that ends instances past their deadline"
  permissions_boundary = var.permissions_boundary_arn
  tags                 = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "states.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
    }]
  })
}

resource "aws_iam_role_policy" "sweeper" {
  name = "end-instances"
  role = aws_iam_role.sweeper.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        # Describing knows no resources; AWS accepts only "*" here.
        Sid       = "Look"
        Effect    = "Allow"
        Action    = "ec2:DescribeInstances"
        Resource  = "*"
        Condition = { StringEquals = { "aws:RequestedRegion" = local.region } }
      },
      {
        Sid       = "End"
        Effect    = "Allow"
        Action    = "ec2:TerminateInstances"
        Resource  = local.instances
        Condition = local.launched_by_us
      },
    ]
  })
}

resource "aws_sfn_state_machine" "sweeper" {
  name       = "gpu-bringup-${var.name}-sweeper"
  role_arn   = aws_iam_role.sweeper.arn
  type       = "STANDARD"
  definition = jsonencode(local.sweeper)
  tags       = var.tags
}

resource "aws_iam_role" "schedule" {
  name                 = "gpu-bringup-${var.name}-schedule"
  description          = "Starts the state machine that ends instances past their deadline"
  permissions_boundary = var.permissions_boundary_arn
  tags                 = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "scheduler.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
    }]
  })
}

resource "aws_iam_role_policy" "schedule" {
  name = "start-sweeper"
  role = aws_iam_role.schedule.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = "states:StartExecution"
      Resource = aws_sfn_state_machine.sweeper.arn
    }]
  })
}

resource "aws_scheduler_schedule" "sweeper" {
  name                = "gpu-bringup-${var.name}-sweeper"
  description         = "Ends instances of cargo xtask validate-ami that are past their deadline"
  schedule_expression = "rate(10 minutes)"

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = aws_sfn_state_machine.sweeper.arn
    role_arn = aws_iam_role.schedule.arn
  }
}
