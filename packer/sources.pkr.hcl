# The three images, which differ in what they start from and in who waits for the validation at boot.

locals {
  # Types with one GPU of the family. The others come in sizes of eight only, which are dear and scarce: their images are
  # built without a GPU, and `cargo xtask validate-ami --ami` validates them on one.
  # Source: https://aws.amazon.com/ec2/instance-types/#Accelerated_Computing
  one_gpu_instance_type = {
    "p3"   = "p3.2xlarge"
    "g4dn" = "g4dn.xlarge"
    "g5"   = "g5.xlarge"
    "g6"   = "g6.xlarge"
    "g6e"  = "g6e.xlarge"
    "p5"   = "p5.4xlarge"
  }
  instance_type_without_gpu = "m7i.2xlarge"

  # The open module does not know Volta (p3), the proprietary one does not know Blackwell (p6-b200). On g4dn and g5 the EKS
  # images load the proprietary one, with which GSP firmware can be turned off (awslabs/amazon-eks-ami#1523); elsewhere
  # NVIDIA recommends the open one.
  usual_kernel_module = {
    "p3"      = "proprietary"
    "g4dn"    = "proprietary"
    "g5"      = "proprietary"
    "g6"      = "open"
    "g6e"     = "open"
    "p4d"     = "open"
    "p4de"    = "open"
    "p5"      = "open"
    "p5e"     = "open"
    "p5en"    = "open"
    "p6-b200" = "open"
  }

  # Families with NVSwitches in some size; fabric manager is installed and enabled on these alone.
  families_with_nvswitch = ["p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"]

  # What does not start on an instance that did not pass.
  gated_unit = {
    "eks-gpu-al2023"     = "kubelet.service"
    "eks-gpu-ubuntu2204" = "snap.kubelet-eks.daemon.service"
    "ubuntu2404-runner"  = "actions-runner.service"
  }

  # NVIDIA's cuda-keyring_1.1-1_all.deb for each release of Ubuntu.
  cuda_keyring_sha256 = {
    "eks-gpu-ubuntu2204" = var.cuda_keyring_sha256 != "" ? var.cuda_keyring_sha256 : "d93190d50b98ad4699ff40f4f7af50f16a76dac3bb8da1eaaf366d47898ff8df"
    "ubuntu2404-runner"  = var.cuda_keyring_sha256 != "" ? var.cuda_keyring_sha256 : "d2a6b11c096396d868758b86dab1823b25e14d70333f1dfa74da5ddaf6a06dba"
  }

  # Unset, the subnet decides.
  public_address = var.ssh_interface == "" ? null : false
  # Without a network Packer would let every address connect. A session needs no rule at all.
  private_networks = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"]
  ssh_from_cidrs   = var.ssh_interface != "" && length(var.ssh_from_cidrs) == 0 ? local.private_networks : var.ssh_from_cidrs

  instance_type  = var.instance_type != "" ? var.instance_type : lookup(local.one_gpu_instance_type, var.gpu_family, local.instance_type_without_gpu)
  has_gpu        = can(regex("^(p[3-9]|g[4-9])[a-z0-9-]*\\.", local.instance_type))
  kernel_module  = var.nvidia_kernel_module != "" ? var.nvidia_kernel_module : local.usual_kernel_module[var.gpu_family]
  fabric_manager = contains(local.families_with_nvswitch, var.gpu_family)
  timestamp      = formatdate("YYYYMMDD-hhmmss", timestamp())
  image_suffix   = "${var.gpu_family}-${var.nvidia_driver_version}-${local.timestamp}"

  # Only an image that passed gets as far as its tags.
  tags = {
    "gpu-bringup.dev/gpu-family"               = var.gpu_family
    "gpu-bringup.dev/nvidia-driver"            = var.nvidia_driver_version
    "gpu-bringup.dev/nvidia-kernel-module"     = local.kernel_module
    "gpu-bringup.dev/nvidia-container-toolkit" = var.nvidia_container_toolkit_version
    "gpu-bringup.dev/cuda-toolkit"             = var.cuda_toolkit_version != "" ? var.cuda_toolkit_version : "none"
    "gpu-bringup.dev/gpu-validator"            = var.validator_version
    "gpu-bringup.dev/verdict"                  = "pass"
    "gpu-bringup.dev/validated-levels"         = local.has_gpu ? "image+standard" : "image"
    "gpu-bringup.dev/validated-on"             = local.instance_type
    "gpu-bringup.dev/source-image"             = "{{ .SourceAMIName }}"
  }
}

source "amazon-ebs" "eks-gpu-al2023" {
  ami_name        = "${var.ami_name_prefix}-eks-gpu-al2023-${var.kubernetes_version}-${local.image_suffix}"
  ami_description = "EKS ${var.kubernetes_version} node for ${var.gpu_family}, NVIDIA driver ${var.nvidia_driver_version}"
  tags            = merge(local.tags, { "gpu-bringup.dev/kubernetes-version" = var.kubernetes_version })

  source_ami_filter {
    filters = {
      name                = "amazon-eks-node-al2023-x86_64-standard-${var.kubernetes_version}-*"
      architecture        = "x86_64"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
    # AWS's own account in every partition, so that nobody else's image of that name is taken.
    owners      = ["amazon"]
    most_recent = true
  }
  launch_block_device_mappings {
    device_name           = "/dev/xvda"
    volume_type           = "gp3"
    iops                  = 3000
    throughput            = 125
    volume_size           = var.root_volume_gib
    encrypted             = true
    kms_key_id            = var.kms_key_id
    delete_on_termination = true
  }

  region        = var.region
  instance_type = local.instance_type
  subnet_id     = var.subnet_id
  imds_support  = "v2.0"
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  iam_instance_profile                      = var.iam_instance_profile
  ssh_interface                             = var.ssh_interface
  associate_public_ip_address               = local.public_address
  temporary_security_group_source_public_ip = length(local.ssh_from_cidrs) == 0
  temporary_security_group_source_cidrs     = local.ssh_from_cidrs
  ssh_username                              = var.ssh_username != "" ? var.ssh_username : "ec2-user"
  ssh_host                                  = var.ssh_host
  ssh_port                                  = var.ssh_port
  run_tags                                  = { Name = "build of ${var.ami_name_prefix}-eks-gpu-al2023" }
}

source "amazon-ebs" "eks-gpu-ubuntu2204" {
  ami_name        = "${var.ami_name_prefix}-eks-gpu-ubuntu2204-${var.kubernetes_version}-${local.image_suffix}"
  ami_description = "EKS ${var.kubernetes_version} node on Ubuntu 22.04 for ${var.gpu_family}, NVIDIA driver ${var.nvidia_driver_version}"
  tags            = merge(local.tags, { "gpu-bringup.dev/kubernetes-version" = var.kubernetes_version })

  source_ami_filter {
    filters = {
      name                = "ubuntu-eks/k8s_${var.kubernetes_version}/images/hvm-ssd*/ubuntu-jammy-22.04-amd64-server-*"
      architecture        = "x86_64"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
    # Canonical: https://documentation.ubuntu.com/aws/en/latest/aws-how-to/instances/find-ubuntu-images/
    owners      = ["099720109477"]
    most_recent = true
  }
  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_type           = "gp3"
    iops                  = 3000
    throughput            = 125
    volume_size           = var.root_volume_gib
    encrypted             = true
    kms_key_id            = var.kms_key_id
    delete_on_termination = true
  }

  region        = var.region
  instance_type = local.instance_type
  subnet_id     = var.subnet_id
  imds_support  = "v2.0"
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  iam_instance_profile                      = var.iam_instance_profile
  ssh_interface                             = var.ssh_interface
  associate_public_ip_address               = local.public_address
  temporary_security_group_source_public_ip = length(local.ssh_from_cidrs) == 0
  temporary_security_group_source_cidrs     = local.ssh_from_cidrs
  ssh_username                              = var.ssh_username != "" ? var.ssh_username : "ubuntu"
  ssh_host                                  = var.ssh_host
  ssh_port                                  = var.ssh_port
  run_tags                                  = { Name = "build of ${var.ami_name_prefix}-eks-gpu-ubuntu2204" }
}

source "amazon-ebs" "ubuntu2404-runner" {
  ami_name        = "${var.ami_name_prefix}-ubuntu2404-runner-${local.image_suffix}"
  ami_description = "GitHub Actions runner on Ubuntu 24.04 for ${var.gpu_family}, NVIDIA driver ${var.nvidia_driver_version}"
  tags            = merge(local.tags, { "gpu-bringup.dev/actions-runner" = var.actions_runner_version })

  source_ami_filter {
    filters = {
      name                = "ubuntu/images/hvm-ssd*/ubuntu-noble-24.04-amd64-server-*"
      architecture        = "x86_64"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
    # Canonical: https://documentation.ubuntu.com/aws/en/latest/aws-how-to/instances/find-ubuntu-images/
    owners      = ["099720109477"]
    most_recent = true
  }
  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_type           = "gp3"
    iops                  = 3000
    throughput            = 125
    volume_size           = var.root_volume_gib
    encrypted             = true
    kms_key_id            = var.kms_key_id
    delete_on_termination = true
  }

  region        = var.region
  instance_type = local.instance_type
  subnet_id     = var.subnet_id
  imds_support  = "v2.0"
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  iam_instance_profile                      = var.iam_instance_profile
  ssh_interface                             = var.ssh_interface
  associate_public_ip_address               = local.public_address
  temporary_security_group_source_public_ip = length(local.ssh_from_cidrs) == 0
  temporary_security_group_source_cidrs     = local.ssh_from_cidrs
  ssh_username                              = var.ssh_username != "" ? var.ssh_username : "ubuntu"
  ssh_host                                  = var.ssh_host
  ssh_port                                  = var.ssh_port
  run_tags                                  = { Name = "build of ${var.ami_name_prefix}-ubuntu2404-runner" }
}
