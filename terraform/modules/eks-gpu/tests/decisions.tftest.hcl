# What is made of an instance type list: EFA, placement group, interfaces, capacity.

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

run "defaults_are_a_tainted_group_that_scales_from_zero" {
  command = apply

  assert {
    condition     = one(aws_eks_node_group.this.taint) == { key = "nvidia.com/gpu", value = "true", effect = "NO_SCHEDULE" }
    error_message = "the taint is not nvidia.com/gpu=true:NoSchedule"
  }

  assert {
    condition     = aws_eks_node_group.this.labels["nvidia.com/gpu"] == "true" && aws_eks_node_group.this.labels["role"] == "gpu"
    error_message = "the labels nvidia.com/gpu=true and role=gpu are missing"
  }

  assert {
    condition     = one(aws_eks_node_group.this.scaling_config) == { min_size = 0, max_size = 4, desired_size = 0 }
    error_message = "the group does not scale from 0 to 4"
  }

  assert {
    condition     = jsonencode(aws_eks_node_group.this.instance_types) == jsonencode(var.instance_types) && aws_eks_node_group.this.capacity_type == "ON_DEMAND" && aws_eks_node_group.this.ami_type == "CUSTOM"
    error_message = "the group is not on demand from our AMI with these types"
  }

  assert {
    condition     = length(aws_placement_group.this) == 0 && output.efa_interfaces == 0 && length(aws_launch_template.this.network_interfaces) == 0
    error_message = "g5.xlarge has no EFA and needs no placement group"
  }

  assert {
    condition     = aws_launch_template.this.vpc_security_group_ids == toset(["sg-0123456789abcdef0"])
    error_message = "the nodes are not in the cluster's security group"
  }

  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_tokens == "required" && aws_launch_template.this.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "IMDSv2 is not required, or pods can reach it"
  }

  assert {
    condition     = aws_launch_template.this.block_device_mappings[0].ebs[0].encrypted == "true" && aws_launch_template.this.block_device_mappings[0].device_name == "/dev/xvda"
    error_message = "the root volume is not encrypted"
  }

  assert {
    condition     = aws_launch_template.this.image_id == var.ami_id
    error_message = "the image is not the validated one"
  }

  assert {
    condition     = aws_eks_node_group.this.tags["k8s.io/cluster-autoscaler/node-template/taint/nvidia.com/gpu"] == "true:NoSchedule" && aws_eks_node_group.this.tags["k8s.io/cluster-autoscaler/node-template/label/role"] == "gpu"
    error_message = "the autoscaler cannot know what a node would be"
  }
}

# EC2 refuses tag keys with a slash on instances whose tags are in the metadata, and EKS itself tags with such keys.
run "tag_keys_with_a_slash_are_accepted" {
  command = apply

  variables {
    tags = { "gpu-bringup.dev/environment" = "production" }
  }

  assert {
    condition     = aws_launch_template.this.metadata_options[0].instance_metadata_tags == "disabled"
    error_message = "the account's default may be enabled, so that the template states it"
  }
}

run "nodeadm_is_told_cluster_labels_and_taint" {
  command = apply

  variables {
    labels = { team = "vision" }
  }

  assert {
    condition = jsondecode(regex("\\{.*\\}", base64decode(aws_launch_template.this.user_data))).spec.cluster == {
      name                 = "training"
      apiServerEndpoint    = "https://0123456789.gr7.eu-central-1.eks.amazonaws.com"
      certificateAuthority = "LS0tLS1CRUdJTi0tLS0t"
      cidr                 = "172.20.0.0/16"
    }
    error_message = "the node does not find its cluster"
  }

  assert {
    condition = jsonencode(jsondecode(regex("\\{.*\\}", base64decode(aws_launch_template.this.user_data))).spec.kubelet.flags) == jsonencode([
      "--node-labels=eks.amazonaws.com/capacityType=ON_DEMAND,eks.amazonaws.com/nodegroup=inference,nvidia.com/gpu=true,role=gpu,team=vision",
      "--register-with-taints=nvidia.com/gpu=true:NoSchedule,gpu-bringup.dev/unvalidated=true:NoSchedule",
    ])
    error_message = "the kubelet registers without labels or taint"
  }

  assert {
    condition     = startswith(base64decode(aws_launch_template.this.user_data), "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"gpu-bringup\"\n\n--gpu-bringup\nContent-Type: application/node.eks.aws\n\n{")
    error_message = "nodeadm does not read this"
  }
}

run "ubuntu_joins_by_its_bootstrap_script" {
  command = apply

  variables {
    operating_system = "ubuntu2204"
  }

  assert {
    condition     = strcontains(base64decode(aws_launch_template.this.user_data), "Content-Type: text/x-shellscript\n\n#!/bin/bash\n") && strcontains(base64decode(aws_launch_template.this.user_data), "--register-with-taints=nvidia.com/gpu=true:NoSchedule,gpu-bringup.dev/unvalidated=true:NoSchedule'")
    error_message = "the kubelet registers without the taints"
  }

  assert {
    condition     = strcontains(base64decode(aws_launch_template.this.user_data), "--ip-family 'ipv4'") && strcontains(base64decode(aws_launch_template.this.user_data), "--dns-cluster-ip '172.20.0.10'")
    error_message = "pods would ask for names where the cluster's service range has none"
  }

  assert {
    # That runtime's template lacks pause image and cgroup driver, and its start sets application clocks.
    condition     = !strcontains(base64decode(aws_launch_template.this.user_data), "--container-runtime")
    error_message = "the handler nvidia is in the template of the default runtime"
  }

  assert {
    condition     = aws_launch_template.this.block_device_mappings[0].device_name == "/dev/sda1"
    error_message = "the root device of Ubuntu is /dev/sda1"
  }
}

run "p5_gets_a_placement_group_and_efa_on_all_32_cards" {
  command = apply

  variables {
    instance_types = ["p5.48xlarge", "p5e.48xlarge"]
    subnet_ids     = ["subnet-0123456789abcdef0"]
  }

  assert {
    condition     = length(aws_placement_group.this) == 1 && aws_placement_group.this[0].strategy == "cluster" && aws_launch_template.this.placement[0].group_name == "training-inference"
    error_message = "the nodes are not close together"
  }

  assert {
    condition     = output.efa_interfaces == 32 && length(aws_launch_template.this.network_interfaces) == 32
    error_message = "p5.48xlarge has 32 EFA interfaces"
  }

  assert {
    condition     = jsonencode(aws_launch_template.this.network_interfaces[*].network_card_index) == jsonencode(range(32))
    error_message = "each interface has a card of its own"
  }

  assert {
    condition = alltrue([
      for index, interface in aws_launch_template.this.network_interfaces :
      interface.device_index == (index == 0 ? 0 : 1) && interface.interface_type == (index == 0 ? "efa" : "efa-only") && length(interface.security_groups) == 2
    ])
    error_message = "the first card carries IP and EFA, the others EFA alone, all in both security groups"
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.efa[0].referenced_security_group_id == aws_security_group.efa[0].id && aws_vpc_security_group_egress_rule.efa[0].referenced_security_group_id == aws_security_group.efa[0].id
    error_message = "EFA reaches more than the group itself"
  }

  assert {
    condition     = length(coalesce(aws_launch_template.this.vpc_security_group_ids, [])) == 0
    error_message = "security groups belong to the interfaces"
  }
}

run "p4d_has_4_and_p5en_16_and_b200_8" {
  command = apply

  variables {
    instance_types = ["p4d.24xlarge"]
    subnet_ids     = ["subnet-0123456789abcdef0"]
  }

  assert {
    condition     = output.efa_interfaces == 4 && local.efa_interfaces["p5en.48xlarge"] == 16 && local.efa_interfaces["p6-b200.48xlarge"] == 8
    error_message = "the numbers of EFA interfaces are wrong"
  }
}

run "mixed_types_do_without_efa" {
  command = apply

  variables {
    instance_types = ["p4d.24xlarge", "p5.48xlarge"]
  }

  assert {
    condition     = output.efa_interfaces == 0 && output.placement_group_name == null
    error_message = "one launch template cannot have 4 and 32 interfaces"
  }
}

run "efa_for_g5_only_when_asked" {
  command = apply

  variables {
    instance_types = ["g5.48xlarge"]
    efa            = true
  }

  assert {
    condition     = output.efa_interfaces == 1 && length(aws_placement_group.this) == 0
    error_message = "EFA was asked for and the type has one interface"
  }
}

run "p5_without_either_when_asked" {
  command = apply

  variables {
    instance_types  = ["p5.48xlarge"]
    placement_group = false
  }

  assert {
    condition     = output.efa_interfaces == 0 && length(aws_placement_group.this) == 0
    error_message = "neither was wanted"
  }
}

run "a_capacity_block_is_used" {
  command = apply

  variables {
    instance_types          = ["p5.48xlarge"]
    subnet_ids              = ["subnet-0123456789abcdef0"]
    capacity_type           = "CAPACITY_BLOCK"
    capacity_reservation_id = "cr-0123456789abcdef0"
  }

  assert {
    condition     = aws_launch_template.this.capacity_reservation_specification[0].capacity_reservation_target[0].capacity_reservation_id == "cr-0123456789abcdef0" && aws_launch_template.this.instance_market_options[0].market_type == "capacity-block"
    error_message = "the block is not used"
  }
}

# 100 and 40 characters, the longest that EKS and this module take; a role has 64.
run "long_names_fit_into_a_role" {
  command = apply

  variables {
    cluster_name = "training-cluster-of-the-vision-team-in-the-region-eu-central-1-with-a-name-as-long-as-eks-takes-it-x"
    name         = "inference-on-single-gpus-of-the-g5-type"
  }

  assert {
    condition     = length(aws_iam_role.node.name) <= 64 && startswith(aws_iam_role.node.name, "training-cluster-of-the-vision-team-in-the-region-eu-c")
    error_message = "the role's name is not the beginning of the cluster's with a digest"
  }
}

run "short_names_are_kept" {
  command = apply

  assert {
    condition     = aws_iam_role.node.name == "training-inference"
    error_message = "a name that fits is not the cluster's and the group's"
  }
}

# The gate removes what the kubelet registered; a taint of the node group, or in the autoscaler's tags, would be there for good.
run "the_startup_taint_is_the_kubelets_alone" {
  command = apply

  assert {
    condition     = length(aws_eks_node_group.this.taint) == 1 && !anytrue([for key in keys(aws_eks_node_group.this.tags) : strcontains(key, "unvalidated")])
    error_message = "the node group has the startup taint"
  }

  assert {
    condition     = output.startup_taint == { key = "gpu-bringup.dev/unvalidated", value = "true", effect = "NoSchedule" }
    error_message = "the autoscaler's --startup-taint is not known"
  }
}

run "a_cluster_without_a_gate_has_no_startup_taint" {
  command = apply

  variables {
    register_unvalidated = false
  }

  assert {
    condition     = !strcontains(base64decode(aws_launch_template.this.user_data), "unvalidated") && output.startup_taint == null
    error_message = "nothing would ever run on the nodes"
  }
}

run "spot_is_in_the_labels_from_the_first_moment" {
  command = apply

  variables {
    capacity_type = "SPOT"
  }

  assert {
    condition     = strcontains(base64decode(aws_launch_template.this.user_data), "eks.amazonaws.com/capacityType=SPOT") && !contains(keys(aws_eks_node_group.this.labels), "eks.amazonaws.com/capacityType")
    error_message = "the kubelet registers without the capacity type, or EKS is given a label of its own"
  }
}

run "a_withheld_node_ends_and_is_reported" {
  command = apply

  variables {
    withheld = { power_off_after_hours = 6, topic_arn = "arn:aws:sns:eu-central-1:111122223333:gpu-nodes" }
  }

  assert {
    condition     = jsondecode(regex("#cloud-config\n(\\{.*\\})", base64decode(aws_launch_template.this.user_data))[0]).write_files[0].content == "POWER_OFF_AFTER_HOURS=6\nTOPIC_ARN=arn:aws:sns:eu-central-1:111122223333:gpu-nodes\n"
    error_message = "the node does not know what becomes of it"
  }

  assert {
    condition     = jsondecode(aws_iam_role_policy.withheld[0].policy).Statement[0] == { Sid = "Publish", Effect = "Allow", Action = "sns:Publish", Resource = "arn:aws:sns:eu-central-1:111122223333:gpu-nodes" }
    error_message = "the role may not publish to the topic, or to more"
  }
}

run "ubuntu_has_both_parts" {
  command = apply

  variables {
    operating_system = "ubuntu2204"
    withheld         = { power_off_after_hours = 1 }
  }

  assert {
    condition     = strcontains(base64decode(aws_launch_template.this.user_data), "Content-Type: text/x-shellscript") && strcontains(base64decode(aws_launch_template.this.user_data), "Content-Type: text/cloud-config") && length(aws_iam_role_policy.withheld) == 0
    error_message = "cloud-init does not read both"
  }
}

run "an_ipv6_cluster" {
  command = apply

  override_data {
    target = data.aws_eks_cluster.this
    values = {
      name                      = "training"
      endpoint                  = "https://0123456789.gr7.eu-central-1.eks.amazonaws.com"
      certificate_authority     = [{ data = "LS0tLS1CRUdJTi0tLS0t" }]
      kubernetes_network_config = [{ elastic_load_balancing = [], ip_family = "ipv6", service_ipv4_cidr = null, service_ipv6_cidr = "fd12:3456:789a::/108" }]
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

  assert {
    condition     = jsondecode(regex("\\{.*\\}", base64decode(aws_launch_template.this.user_data))).spec.cluster.cidr == "fd12:3456:789a::/108"
    error_message = "nodeadm would give the node an IPv4 address"
  }

  assert {
    condition     = length(aws_iam_role_policy.cni_ipv6) == 1 && !anytrue([for attachment in aws_iam_role_policy_attachment.node : endswith(attachment.policy_arn, "AmazonEKS_CNI_Policy")])
    error_message = "the CNI could not assign addresses of IPv6"
  }
}

run "ubuntu_in_an_ipv6_cluster" {
  command = apply

  variables {
    operating_system = "ubuntu2204"
  }

  override_data {
    target = data.aws_eks_cluster.this
    values = {
      name                      = "training"
      endpoint                  = "https://0123456789.gr7.eu-central-1.eks.amazonaws.com"
      certificate_authority     = [{ data = "LS0tLS1CRUdJTi0tLS0t" }]
      kubernetes_network_config = [{ elastic_load_balancing = [], ip_family = "ipv6", service_ipv4_cidr = null, service_ipv6_cidr = "fd12:3456:789a::/108" }]
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

  assert {
    condition     = strcontains(base64decode(aws_launch_template.this.user_data), "--ip-family 'ipv6' \\\n  --service-ipv6-cidr 'fd12:3456:789a::/108'")
    error_message = "bootstrap.sh ends with an error"
  }
}

run "a_cni_with_a_role_of_its_own" {
  command = apply

  variables {
    cni_uses_node_role     = false
    additional_policy_arns = ["arn:aws:iam::111122223333:policy/nodes"]
  }

  assert {
    condition     = !anytrue([for attachment in aws_iam_role_policy_attachment.node : endswith(attachment.policy_arn, "AmazonEKS_CNI_Policy")]) && aws_iam_role_policy_attachment.additional["arn:aws:iam::111122223333:policy/nodes"].policy_arn == "arn:aws:iam::111122223333:policy/nodes"
    error_message = "the role has the CNI's rights, or not our own policy"
  }
}

run "spot" {
  command = apply

  variables {
    capacity_type = "SPOT"
  }

  assert {
    condition     = aws_eks_node_group.this.capacity_type == "SPOT" && length(aws_launch_template.this.instance_market_options) == 0
    error_message = "EKS asks for spot capacity by itself"
  }
}

run "the_role_gets_managed_policies_and_no_own_one" {
  command = apply

  variables {
    additional_managed_policies = ["AmazonSSMManagedInstanceCore"]
  }

  assert {
    condition = toset([for attachment in aws_iam_role_policy_attachment.node : attachment.policy_arn]) == toset([
      "arn:aws:iam::aws:policy/AmazonEKSWorkerNodePolicy",
      "arn:aws:iam::aws:policy/AmazonEC2ContainerRegistryPullOnly",
      "arn:aws:iam::aws:policy/AmazonEKS_CNI_Policy",
      "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore",
    ])
    error_message = "the role has other policies"
  }
}
