# Not part of any environment: `cargo xtask tf check` makes sure that all of this is refused. Each comment is an error.

terraform {
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 6.25"
    }
  }
}

resource "aws_eks_node_group" "wrong" {
  # refused: The argument "node_role_arn" is required
  cluster_name = "training"
  # refused: Inappropriate value for attribute "subnet_ids": set of string required
  subnet_ids = "subnet-0123456789abcdef0"
  # refused: An argument named "instance_typs" is not expected here
  instance_typs = ["g5.xlarge"]
  # refused: At least 1 "scaling_config" blocks are required
}

resource "aws_launch_template" "wrong" {
  metadata_options {
    # refused: An argument named "http_token" is not expected here
    http_token = "required"
  }

  # refused: Blocks of type "network_interface" are not expected here
  network_interface {
  }
}

# refused: The provider hashicorp/aws does not support resource type "aws_gpu_fleet"
resource "aws_gpu_fleet" "wrong" {
}

resource "aws_launch_template" "metadata_tags" {
  metadata_options {
    instance_metadata_tags = "enabled"
  }

  tag_specifications {
    resource_type = "instance"
    # refused: 'kubernetes.io/cluster/training' is not a valid tag key
    tags = { "kubernetes.io/cluster/training" = "owned" }
  }
}

resource "aws_iam_role" "long_name" {
  # refused: expected length of name to be in the range (1 - 64)
  name               = "a-name-of-65-characters-a-name-of-65-characters-a-name-of-65-char"
  assume_role_policy = "{}"
}
