# What a build can be told. `cargo xtask ami build TEMPLATE --var NAME=VALUE` sets one; docs/ami.md shows how.

packer {
  required_version = ">= 1.10.0"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = ">= 1.3.0, < 2.0.0"
    }
  }
}

variable "region" {
  type        = string
  description = "AWS region to build in."
  default     = "us-west-2"

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "The region must be one of AWS's, such as us-west-2."
  }
}

variable "gpu_family" {
  type        = string
  description = "EC2 instance family of the instances to come; names the profile in manifests/profiles that the image must meet."
  default     = "g6"

  validation {
    condition     = contains(["p3", "g4dn", "g5", "g6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"], var.gpu_family)
    error_message = "The gpu_family must be one of p3, g4dn, g5, g6, g6e, p4d, p4de, p5, p5e, p5en, p6-b200."
  }
}

variable "instance_type" {
  type        = string
  description = "Instance type to build on. With one of a GPU family the image is validated on its GPUs, too; empty takes the family's smallest where that has one GPU, and a type without GPU elsewhere."
  default     = ""

  validation {
    condition     = var.instance_type == "" || can(regex("^[a-z0-9-]+\\.[0-9a-z-]+$", var.instance_type))
    error_message = "The instance_type must be a type, such as g6.xlarge."
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
  description = "Full version of NVIDIA's driver, as NVIDIA's repository for the distribution has it; its first number is the branch."

  validation {
    condition     = can(regex("^[0-9]{3}\\.[0-9]{1,3}(\\.[0-9]{2})?$", var.nvidia_driver_version))
    error_message = "The nvidia_driver_version must be a full version, such as 580.95.05."
  }
}

variable "nvidia_kernel_module" {
  type        = string
  description = "Flavour of the kernel module, open or proprietary; empty takes the one that suits the GPU generation."
  default     = ""

  validation {
    condition     = contains(["", "open", "proprietary"], var.nvidia_kernel_module)
    error_message = "The nvidia_kernel_module must be open or proprietary, or empty."
  }
}

variable "nvidia_container_toolkit_version" {
  type        = string
  description = "Version of NVIDIA's container toolkit; from 1.18.0 on it writes the CDI specification at boot."

  validation {
    condition     = can(regex("^1\\.(1[89]|[2-9][0-9])\\.[0-9]+$", var.nvidia_container_toolkit_version))
    error_message = "The nvidia_container_toolkit_version must be 1.18.0 or newer, such as 1.18.2."
  }
}

variable "cuda_toolkit_version" {
  type        = string
  description = "CUDA toolkit to install, major and minor version such as 12.8; empty installs none."
  default     = ""

  validation {
    condition     = var.cuda_toolkit_version == "" || can(regex("^1[2-9]\\.[0-9]$", var.cuda_toolkit_version))
    error_message = "The cuda_toolkit_version must be a major and minor version from 12.0 on, such as 12.8, or empty."
  }
}

variable "cuda_keyring_sha256" {
  type        = string
  description = "SHA-256 of the package with the key of NVIDIA's repository for Ubuntu; empty takes the one that is known."
  default     = ""

  validation {
    condition     = var.cuda_keyring_sha256 == "" || can(regex("^[0-9a-f]{64}$", var.cuda_keyring_sha256))
    error_message = "The cuda_keyring_sha256 must be 64 hexadecimal digits, or empty."
  }
}

variable "actions_runner_version" {
  type        = string
  description = "Version of the GitHub Actions runner of ubuntu2404-runner."

  validation {
    condition     = can(regex("^2\\.[0-9]+\\.[0-9]+$", var.actions_runner_version))
    error_message = "The actions_runner_version must be a full version, such as 2.337.0."
  }
}

variable "actions_runner_sha256" {
  type        = string
  description = "SHA-256 of the runner's archive for linux-x64, as its release page has it."

  validation {
    condition     = can(regex("^[0-9a-f]{64}$", var.actions_runner_sha256))
    error_message = "The actions_runner_sha256 must be 64 hexadecimal digits."
  }
}

variable "validator_folder" {
  type        = string
  description = "Folder with gpu-validator and gpu-validator.1, as `cargo xtask dist` leaves it; relative to where packer is started."
  default     = "target/dist"

  validation {
    condition     = trimspace(var.validator_folder) != ""
    error_message = "The validator_folder must name a folder."
  }
}

variable "validator_version" {
  type        = string
  description = "Version of that gpu-validator, for the image's tags; `cargo xtask ami` asks the binary."
  default     = "unknown"

  validation {
    condition     = var.validator_version == "unknown" || can(regex("^[0-9]+[.][0-9]+[.][0-9]+[0-9A-Za-z.+-]{0,48}$", var.validator_version))
    error_message = "The validator_version must be a version, such as 0.1.0, or unknown."
  }
}

variable "sentinel_enabled" {
  type        = bool
  description = "Work idle GPUs with `gpu-validator sentinel` from boot on, see docs/sentinel.md."
  default     = false
}

variable "report_folder" {
  type        = string
  description = "Folder on this machine for the validation's reports and the manifest; relative to where packer is started."
  default     = "target/ami/reports"

  validation {
    condition     = trimspace(var.report_folder) != ""
    error_message = "The report_folder must name a folder."
  }
}

variable "ami_name_prefix" {
  type        = string
  description = "Beginning of the image's name."
  default     = "gpu-bringup"

  validation {
    condition     = can(regex("^[0-9A-Za-z()./_-]{3,48}$", var.ami_name_prefix))
    error_message = "The ami_name_prefix may have 3 to 48 letters, digits and ( ) . / - _ only."
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

  validation {
    condition     = var.kms_key_id == "" || can(regex("^(arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:)?(key/|alias/)?[0-9A-Za-z/_-]+$", var.kms_key_id))
    error_message = "The kms_key_id must be a key's id, alias (alias/…) or ARN, or empty."
  }
}

variable "subnet_id" {
  type        = string
  description = "Subnet of the build instance; empty takes one of the default VPC."
  default     = ""

  validation {
    condition     = var.subnet_id == "" || can(regex("^subnet-[0-9a-f]{8,17}$", var.subnet_id))
    error_message = "The subnet_id must be a subnet's id, such as subnet-0123456789abcdef0."
  }
}

variable "ssh_interface" {
  type        = string
  description = "How the build instance is reached: session_manager or private_ip, without a public address; empty takes its public address where the subnet gives one, else its private one."
  default     = ""

  validation {
    condition     = contains(["", "private_ip", "session_manager"], var.ssh_interface)
    error_message = "The ssh_interface must be session_manager or private_ip, or empty."
  }
}

variable "iam_instance_profile" {
  type        = string
  description = "Instance profile of the build instance, for Session Manager alone (output build_instance_profile of terraform/modules/github-bake); empty gives it none."
  default     = ""

  validation {
    condition     = can(regex("^[0-9A-Za-z+=,.@_-]{0,128}$", var.iam_instance_profile))
    error_message = "The iam_instance_profile must be a profile's name, or empty."
  }
}

variable "ssh_from_cidrs" {
  type        = list(string)
  description = "Networks that may connect to the build instance by ssh; empty finds out this machine's public address and allows that alone."
  default     = []

  validation {
    condition     = length([for cidr in var.ssh_from_cidrs : cidr if can(regex("/0$", cidr))]) == 0
    error_message = "The ssh_from_cidrs must not be the whole internet."
  }
}

variable "ssh_host" {
  type        = string
  description = "Where the build instance's ssh is reached when not at its own address, such as the near end of a tunnel."
  default     = ""

  validation {
    condition     = can(regex("^[0-9A-Za-z.:_-]*$", var.ssh_host))
    error_message = "The ssh_host must be a host's name or address, or empty."
  }
}

variable "ssh_port" {
  type        = number
  description = "Port of the build instance's ssh."
  default     = 22

  validation {
    condition     = var.ssh_port >= 1 && var.ssh_port <= 65535
    error_message = "The ssh_port must be from 1 to 65535."
  }
}

variable "ssh_username" {
  type        = string
  description = "User of the source image that may connect and use sudo; empty takes the distribution's own."
  default     = ""

  validation {
    condition     = can(regex("^([a-z_][a-z0-9_-]{0,31})?$", var.ssh_username))
    error_message = "The ssh_username must be a user's name, or empty."
  }
}
