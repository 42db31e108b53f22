# Ends what is past its deadline, whatever became of the process that launched it and of the instance's own timer (an AMI
# that does not boot has none). A state machine of two calls needs no code to be deployed and no machine to run on.

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
        Action    = "ec2:DescribeTags"
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
  name     = "gpu-bringup-${var.name}-sweeper"
  role_arn = aws_iam_role.sweeper.arn
  type     = "STANDARD"
  definition = templatefile("${path.module}/sweeper.asl.json", {
    partition    = local.partition
    deadline_tag = local.deadline_tag
  })
  tags = var.tags
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

    # The scheduler puts the time in, in the form that `cargo xtask validate-ami` gives to the deadline. Not by jsonencode,
    # which writes < and > as escapes that the scheduler would not find.
    input = "{\"now\": \"<aws.scheduler.scheduled-time>\"}"
  }
}
