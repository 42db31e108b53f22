# Every validation refuses what it is there for.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_eks_cluster" {
    defaults = {
      name                      = "training"
      endpoint                  = "https://0123456789.gr7.eu-central-1.eks.amazonaws.com"
      certificate_authority     = [{ data = "LS0tLS1CRUdJTi0tLS0t" }]
      kubernetes_network_config = [{ elastic_load_balancing = [], ip_family = "ipv4", service_ipv4_cidr = "172.20.0.0/16", service_ipv6_cidr = null }]
      vpc_config = [{
        cluster_security_group_id = "sg-0123456789abcdef0"
        endpoint_private_access   = true
        endpoint_public_access    = false
        public_access_cidrs       = []
        security_group_ids        = []
        subnet_ids                = []
        vpc_id                    = "vpc-0123456789abcdef0"
      }]
    }
  }
}

variables {
  name           = "inference"
  cluster_name   = "training"
  ami_id         = "ami-0123456789abcdef0"
  instance_types = ["g5.xlarge", "g5.2xlarge"]
  subnet_ids     = ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]
  scaling        = { max_size = 4 }
}

run "a_wrong_name_is_refused" {
  command = plan
  variables {
    name = "GPU nodes"
  }
  expect_failures = [var.name]
}

run "a_wrong_cluster_is_refused" {
  command = plan
  variables {
    cluster_name = ""
  }
  expect_failures = [var.cluster_name]
}

run "an_image_by_name_is_refused" {
  command = plan
  variables {
    ami_id = "eks-gpu-al2023"
  }
  expect_failures = [var.ami_id]
}

run "an_unknown_operating_system_is_refused" {
  command = plan
  variables {
    operating_system = "windows"
  }
  expect_failures = [var.operating_system]
}

run "no_instance_type_is_refused" {
  command = plan
  variables {
    instance_types = []
  }
  expect_failures = [var.instance_types]
}

run "a_type_without_nvidia_gpu_is_refused" {
  command = plan
  variables {
    instance_types = ["g4ad.xlarge"]
  }
  expect_failures = [var.instance_types]
}

run "a_type_of_another_architecture_is_refused" {
  command = plan
  variables {
    instance_types = ["g5g.xlarge"]
  }
  expect_failures = [var.instance_types]
}

run "an_unknown_capacity_type_is_refused" {
  command = plan
  variables {
    capacity_type = "FREE"
  }
  expect_failures = [var.capacity_type]
}

run "a_wrong_reservation_is_refused" {
  command = plan
  variables {
    capacity_reservation_id = "p5-block"
  }
  expect_failures = [var.capacity_reservation_id]
}

run "no_subnet_is_refused" {
  command = plan
  variables {
    subnet_ids = []
  }
  expect_failures = [var.subnet_ids]
}

run "a_zone_for_a_subnet_is_refused" {
  command = plan
  variables {
    subnet_ids = ["eu-central-1a"]
  }
  expect_failures = [var.subnet_ids]
}

run "a_minimum_above_the_maximum_is_refused" {
  command = plan
  variables {
    scaling = { min_size = 5, max_size = 4 }
  }
  expect_failures = [var.scaling]
}

run "a_maximum_of_none_is_refused" {
  command = plan
  variables {
    scaling = { max_size = 0 }
  }
  expect_failures = [var.scaling]
}

run "half_a_node_is_refused" {
  command = plan
  variables {
    scaling = { min_size = 0.5, max_size = 2 }
  }
  expect_failures = [var.scaling]
}

run "more_wanted_than_allowed_is_refused" {
  command = plan
  variables {
    scaling = { max_size = 2, desired_size = 3 }
  }
  expect_failures = [var.scaling]
}

run "a_small_root_volume_is_refused" {
  command = plan
  variables {
    root_volume_gib = 20
  }
  expect_failures = [var.root_volume_gib]
}

run "an_alias_of_a_key_is_refused" {
  command = plan
  variables {
    kms_key_arn = "alias/ebs"
  }
  expect_failures = [var.kms_key_arn]
}

run "our_own_label_is_refused" {
  command = plan
  variables {
    labels = { role = "cpu" }
  }
  expect_failures = [var.labels]
}

run "a_label_of_eks_is_refused" {
  command = plan
  variables {
    labels = { "eks.amazonaws.com/capacityType" = "SPOT" }
  }
  expect_failures = [var.labels]
}

run "a_power_off_in_minutes_is_refused" {
  command = plan
  variables {
    withheld = { power_off_after_hours = 0.5 }
  }
  expect_failures = [var.withheld]
}

run "a_topic_by_name_is_refused" {
  command = plan
  variables {
    withheld = { topic_arn = "gpu-nodes" }
  }
  expect_failures = [var.withheld]
}

run "a_policy_of_aws_by_arn_is_refused" {
  command = plan
  variables {
    additional_policy_arns = ["arn:aws:iam::aws:policy/AdministratorAccess"]
  }
  expect_failures = [var.additional_policy_arns]
}

run "a_label_that_breaks_out_is_refused" {
  command = plan
  variables {
    labels = { team = "a' ; reboot '" }
  }
  expect_failures = [var.labels]
}

run "a_policy_by_arn_is_refused" {
  command = plan
  variables {
    additional_managed_policies = ["arn:aws:iam::aws:policy/AdministratorAccess"]
  }
  expect_failures = [var.additional_managed_policies]
}

run "a_wrong_boundary_is_refused" {
  command = plan
  variables {
    permissions_boundary_arn = "boundary"
  }
  expect_failures = [var.permissions_boundary_arn]
}

run "a_tag_of_aws_is_refused" {
  command = plan
  variables {
    tags = { "aws:created" = "x" }
  }
  expect_failures = [var.tags]
}

run "a_placement_group_over_two_zones_is_refused" {
  command = plan
  variables {
    instance_types = ["p5.48xlarge"]
  }
  expect_failures = [aws_eks_node_group.this]
}

run "a_capacity_block_without_a_reservation_is_refused" {
  command = plan
  variables {
    capacity_type = "CAPACITY_BLOCK"
  }
  expect_failures = [aws_eks_node_group.this]
}

run "spot_in_a_reservation_is_refused" {
  command = plan
  variables {
    capacity_type           = "SPOT"
    capacity_reservation_id = "cr-0123456789abcdef0"
  }
  expect_failures = [aws_eks_node_group.this]
}

run "efa_where_a_type_has_none_is_refused" {
  command = plan
  variables {
    instance_types = ["g5.xlarge"]
    efa            = true
  }
  expect_failures = [aws_launch_template.this]
}

run "efa_where_types_differ_is_refused" {
  command = plan
  variables {
    instance_types = ["p4d.24xlarge", "p5.48xlarge"]
    efa            = true
  }
  expect_failures = [aws_launch_template.this]
}
