mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
  mock_data "aws_region" {
    defaults = { region = "eu-central-1" }
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
  region             = "eu-central-1"
  cluster_name       = "training"
  vpc_id             = "vpc-0123456789abcdef0"
  private_subnet_ids = ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]
  ami_id             = "ami-0123456789abcdef0"
}

run "outputs_are_those_that_other_parts_read" {
  command = apply

  assert {
    condition     = output.foundation == "/gpu-bringup/${local.validation_instance}"
    error_message = "cargo xtask validate-ami would not find its foundation"
  }

  assert {
    condition     = output.node_groups["g5"].labels["nvidia.com/gpu"] == "true" && output.node_groups["g5"].toleration.effect == "NoSchedule"
    error_message = "pods would not find the nodes"
  }
}

run "a_group_of_p5_beside_it" {
  command = apply

  variables {
    node_groups = {
      g5 = { instance_types = ["g5.xlarge"], max_size = 1 }
      p5 = {
        instance_types          = ["p5.48xlarge"]
        max_size                = 4
        subnet_ids              = ["subnet-0123456789abcdef1"]
        capacity_type           = "CAPACITY_BLOCK"
        capacity_reservation_id = "cr-0123456789abcdef0"
      }
    }
  }

  assert {
    condition     = output.node_groups["p5"].efa_interfaces == 32 && output.node_groups["p5"].placement_group_name == "training-p5" && output.node_groups["g5"].efa_interfaces == 0
    error_message = "each group is decided by its own types"
  }
}

run "what_an_account_asks_for_reaches_every_role_and_node" {
  command = apply

  variables {
    register_unvalidated        = false
    cni_uses_node_role          = false
    additional_managed_policies = ["AmazonSSMManagedInstanceCore"]
    additional_policy_arns      = ["arn:aws:iam::111122223333:policy/nodes"]
    kms_key_arn                 = "arn:aws:kms:eu-central-1:111122223333:key/0123"
    permissions_boundary_arn    = "arn:aws:iam::111122223333:policy/boundary"
    tags                        = { "cost-center" = "gpu" }
    withheld                    = { power_off_after_hours = 6 }
  }

  assert {
    condition     = output.node_groups["g5"].startup_taint == null && output.node_groups["g5"].node_role_policies == toset(["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly", "AmazonSSMManagedInstanceCore", "arn:aws:iam::111122223333:policy/nodes"])
    error_message = "the variables do not reach the node group"
  }
}

run "nodes_of_a_cluster_whose_cni_has_no_role_become_ready" {
  command = apply

  assert {
    condition     = contains(output.node_groups["g5"].node_role_policies, "AmazonEKS_CNI_Policy") && output.node_groups["g5"].startup_taint.key == "gpu-bringup.dev/unvalidated"
    error_message = "nodes never become ready, or are not gated"
  }
}

run "a_zone_is_not_a_region" {
  command = plan
  variables {
    region = "eu-central-1a"
  }
  expect_failures = [var.region]
}
