# An EKS node image with NVIDIA's driver, for one EC2 GPU family, that gpu-validator has found fit for work on a GPU of
# that family. The build instance has one: an image whose validation does not pass is not registered. docs/ami.md says how
# to build it.

packer {
  required_version = ">= 1.10.0"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "~> 1.3"
    }
  }
}

variable "region" {
  type        = string
  description = "AWS region to build in."
  default     = "us-west-2"
}

variable "gpu_family" {
  type        = string
  description = "EC2 instance family of the nodes; names the profile in manifests/profiles that the image must meet."
  default     = "g6"

  validation {
    condition     = contains(["p3", "g4dn", "g5", "g6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"], var.gpu_family)
    error_message = "The gpu_family must be one of p3, g4dn, g5, g6, g6e, p4d, p4de, p5, p5e, p5en, p6-b200."
  }
}

variable "instance_type" {
  type        = string
  description = "Instance type to build and validate on, with a GPU of the family; empty takes the family's smallest."
  default     = ""

  validation {
    condition     = var.instance_type == "" || can(regex("^(p3|g4dn|g5|g6|g6e|p4d|p4de|p5|p5e|p5en|p6-b200)\\.[0-9a-z]+$", var.instance_type))
    error_message = "The instance_type must be of one of the GPU families, such as g6.xlarge."
  }
}

variable "kubernetes_version" {
  type        = string
  description = "Kubernetes version of the EKS image to start from."
  default     = "1.33"

  validation {
    condition     = can(regex("^1\\.[0-9]{2}$", var.kubernetes_version))
    error_message = "The kubernetes_version must be a minor version, such as 1.33."
  }
}

variable "nvidia_driver_version" {
  type        = string
  description = "Full version of NVIDIA's driver, as its repository for Amazon Linux 2023 has it; its first number is the branch."
  default     = "580.95.05"

  validation {
    condition     = can(regex("^[0-9]{3}\\.[0-9]{1,3}(\\.[0-9]{2})?$", var.nvidia_driver_version))
    error_message = "The nvidia_driver_version must be a full version, such as 580.95.05."
  }
}

variable "nvidia_kernel_module" {
  type        = string
  description = "Flavour of the kernel module, open or proprietary; empty takes the one that suits the family."
  default     = ""

  validation {
    condition     = contains(["", "open", "proprietary"], var.nvidia_kernel_module)
    error_message = "The nvidia_kernel_module must be open or proprietary, or empty."
  }
}

variable "nvidia_container_toolkit_version" {
  type        = string
  description = "Version of NVIDIA's container toolkit; from 1.18.0 on it writes the CDI specification at boot."
  default     = "1.18.2"

  validation {
    condition     = can(regex("^1\\.(1[89]|[2-9][0-9])\\.[0-9]+$", var.nvidia_container_toolkit_version))
    error_message = "The nvidia_container_toolkit_version must be 1.18.0 or newer, such as 1.18.2."
  }
}

variable "validator_folder" {
  type        = string
  description = "Folder with gpu-validator and gpu-validator.1, as `cargo xtask dist` leaves it; relative to where packer is started."
  default     = "target/dist"
}

variable "report_folder" {
  type        = string
  description = "Folder on this machine for the validation's reports and the manifest; relative to where packer is started."
  default     = "target/ami"
}

variable "ami_name_prefix" {
  type        = string
  description = "Beginning of the image's name."
  default     = "gpu-bringup-eks-al2023"

  validation {
    condition     = can(regex("^[0-9A-Za-z()./_-]{3,64}$", var.ami_name_prefix))
    error_message = "The ami_name_prefix may have 3 to 64 letters, digits and ( ) . / - _ only."
  }
}

variable "root_volume_gib" {
  type        = number
  description = "Size of the root volume, in GiB."
  default     = 50

  validation {
    condition     = var.root_volume_gib >= 20 && var.root_volume_gib <= 16384
    error_message = "The root_volume_gib must be from 20 to 16384."
  }
}

variable "kms_key_id" {
  type        = string
  description = "KMS key that encrypts the image; empty takes the account's key for EBS, with which an image cannot be shared."
  default     = ""
}

variable "subnet_id" {
  type        = string
  description = "Subnet of the build instance; empty takes one of the default VPC."
  default     = ""
}

locals {
  # The smallest size of each family. Source: https://aws.amazon.com/ec2/instance-types/#Accelerated_Computing
  smallest_instance_type = {
    "p3"      = "p3.2xlarge"
    "g4dn"    = "g4dn.xlarge"
    "g5"      = "g5.xlarge"
    "g6"      = "g6.xlarge"
    "g6e"     = "g6e.xlarge"
    "p4d"     = "p4d.24xlarge"
    "p4de"    = "p4de.24xlarge"
    "p5"      = "p5.4xlarge"
    "p5e"     = "p5e.48xlarge"
    "p5en"    = "p5en.48xlarge"
    "p6-b200" = "p6-b200.48xlarge"
  }

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

  instance_type  = var.instance_type != "" ? var.instance_type : local.smallest_instance_type[var.gpu_family]
  kernel_module  = var.nvidia_kernel_module != "" ? var.nvidia_kernel_module : local.usual_kernel_module[var.gpu_family]
  fabric_manager = contains(local.families_with_nvswitch, var.gpu_family)
  timestamp      = formatdate("YYYYMMDD-hhmmss", timestamp())
  image_name     = "${var.ami_name_prefix}-${var.kubernetes_version}-${var.gpu_family}-${var.nvidia_driver_version}-${local.timestamp}"

  # Where the validation leaves its reports on the build instance.
  remote_report_folder = "/var/tmp/gpu-validation"
}

source "amazon-ebs" "eks_gpu_al2023" {
  region        = var.region
  instance_type = local.instance_type
  subnet_id     = var.subnet_id

  ami_name        = local.image_name
  ami_description = "EKS ${var.kubernetes_version} node for ${var.gpu_family}, NVIDIA driver ${var.nvidia_driver_version}"
  imds_support    = "v2.0"

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

  # The image's snapshot is encrypted with the key of the volume that it is taken of.
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

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  # Only the machine that builds may connect.
  temporary_security_group_source_public_ip = true
  ssh_username                              = "ec2-user"

  run_tags = {
    Name = "build of ${local.image_name}"
  }

  tags = {
    Name                                       = local.image_name
    "gpu-bringup.dev/gpu-family"               = var.gpu_family
    "gpu-bringup.dev/kubernetes-version"       = var.kubernetes_version
    "gpu-bringup.dev/nvidia-driver"            = var.nvidia_driver_version
    "gpu-bringup.dev/nvidia-kernel-module"     = local.kernel_module
    "gpu-bringup.dev/nvidia-container-toolkit" = var.nvidia_container_toolkit_version
    "gpu-bringup.dev/validated-on"             = local.instance_type
    "gpu-bringup.dev/source-image"             = "{{ .SourceAMIName }}"
  }
}

build {
  sources = ["source.amazon-ebs.eks_gpu_al2023"]

  provisioner "shell" {
    script          = "${path.root}/provisioners/install-nvidia-driver.sh"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }}"
    environment_vars = [
      "GPU_FAMILY=${var.gpu_family}",
      "NVIDIA_DRIVER_VERSION=${var.nvidia_driver_version}",
      "NVIDIA_KERNEL_MODULE=${local.kernel_module}",
      "FABRIC_MANAGER=${local.fabric_manager}",
    ]
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/install-container-toolkit.sh"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }}"
    environment_vars = [
      "NVIDIA_CONTAINER_TOOLKIT_VERSION=${var.nvidia_container_toolkit_version}",
    ]
  }

  provisioner "shell" {
    inline = ["mkdir --parents /tmp/gpu-bringup/profiles"]
  }

  provisioner "file" {
    sources = [
      "${var.validator_folder}/gpu-validator",
      "${var.validator_folder}/gpu-validator.1",
      "${path.root}/files/gpu-validator-firstboot.service",
      "${path.root}/files/kubelet-requires-gpu-validator.conf",
    ]
    destination = "/tmp/gpu-bringup/"
  }

  provisioner "file" {
    source      = "${path.root}/../manifests/profiles/"
    destination = "/tmp/gpu-bringup/profiles"
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/install-gpu-validator.sh"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }}"
    environment_vars = [
      "UPLOADED_FOLDER=/tmp/gpu-bringup",
      "GPU_FAMILY=${var.gpu_family}",
    ]
  }

  # The validation in three steps, so that the reports reach the builder's disk whatever they say: run it and keep its exit
  # code, bring the reports, end with that code.
  provisioner "shell" {
    script          = "${path.root}/provisioners/run-validation.sh"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }}"
    environment_vars = [
      "REPORT_FOLDER=${local.remote_report_folder}",
    ]
  }

  provisioner "file" {
    direction   = "download"
    source      = "${local.remote_report_folder}/report.xml"
    destination = "${var.report_folder}/${local.image_name}/report.xml"
  }

  provisioner "file" {
    direction   = "download"
    source      = "${local.remote_report_folder}/report.json"
    destination = "${var.report_folder}/${local.image_name}/report.json"
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/end-with-verdict.sh"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }}"
    environment_vars = [
      "REPORT_FOLDER=${local.remote_report_folder}",
    ]
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/clean-image.sh"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }}"
  }

  post-processor "manifest" {
    output     = "${var.report_folder}/${local.image_name}/manifest.json"
    strip_path = true
  }
}
