# One build for all three images: driver, container toolkit, what is optional, the validator and its units; then validate.
#
# The order at the end matters. On a build instance with a GPU the driver is put to work first (level standard). Then
# everything of the build instance is removed, and level image looks at the disk as it will be registered. The reports reach
# this machine whatever they say; only then does a build that did not pass end.

locals {
  # Where the validation leaves its reports on the build instance.
  remote_report_folder = "/var/tmp/gpu-validation"
  uploaded_folder      = "/tmp/gpu-bringup"
  as_root              = "sudo env {{ .Vars }} bash {{ .Path }}"
}

build {
  sources = [
    "source.amazon-ebs.eks-gpu-al2023",
    "source.amazon-ebs.eks-gpu-ubuntu2204",
    "source.amazon-ebs.ubuntu2404-runner",
  ]

  provisioner "shell" {
    script          = "${path.root}/provisioners/wait-for-cloud-init.sh"
    execute_command = local.as_root
  }

  provisioner "shell" {
    only            = ["amazon-ebs.eks-gpu-al2023"]
    script          = "${path.root}/provisioners/install-nvidia-driver-al2023.sh"
    execute_command = local.as_root
    environment_vars = [
      "GPU_FAMILY=${var.gpu_family}",
      "NVIDIA_DRIVER_VERSION=${var.nvidia_driver_version}",
      "NVIDIA_KERNEL_MODULE=${local.kernel_module}",
      "FABRIC_MANAGER=${local.fabric_manager}",
      "CUDA_TOOLKIT_VERSION=${var.cuda_toolkit_version}",
    ]
  }

  provisioner "shell" {
    only            = ["amazon-ebs.eks-gpu-ubuntu2204", "amazon-ebs.ubuntu2404-runner"]
    script          = "${path.root}/provisioners/install-nvidia-driver-ubuntu.sh"
    execute_command = local.as_root
    environment_vars = [
      "CUDA_KEYRING_SHA256=${lookup(local.cuda_keyring_sha256, source.name, "")}",
      "GPU_FAMILY=${var.gpu_family}",
      "NVIDIA_DRIVER_VERSION=${var.nvidia_driver_version}",
      "NVIDIA_KERNEL_MODULE=${local.kernel_module}",
      "FABRIC_MANAGER=${local.fabric_manager}",
      "CUDA_TOOLKIT_VERSION=${var.cuda_toolkit_version}",
    ]
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/install-container-toolkit.sh"
    execute_command = local.as_root
    environment_vars = [
      "NVIDIA_CONTAINER_TOOLKIT_VERSION=${var.nvidia_container_toolkit_version}",
    ]
  }

  provisioner "shell" {
    only            = ["amazon-ebs.eks-gpu-ubuntu2204"]
    script          = "${path.root}/provisioners/configure-containerd-ubuntu.sh"
    execute_command = local.as_root
  }

  provisioner "shell" {
    inline = ["mkdir -p ${local.uploaded_folder}/profiles ${local.uploaded_folder}/files ${local.uploaded_folder}/hooks"]
  }

  provisioner "file" {
    sources = [
      "${var.validator_folder}/gpu-validator",
      "${var.validator_folder}/gpu-validator.1",
    ]
    destination = "${local.uploaded_folder}/"
  }

  provisioner "file" {
    source      = "${path.root}/files/"
    destination = "${local.uploaded_folder}/files"
  }

  provisioner "file" {
    only        = ["amazon-ebs.ubuntu2404-runner"]
    source      = "${path.root}/../workflows/hooks/"
    destination = "${local.uploaded_folder}/hooks"
  }

  provisioner "file" {
    source      = "${path.root}/../manifests/profiles/"
    destination = "${local.uploaded_folder}/profiles"
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/install-gpu-validator.sh"
    execute_command = local.as_root
    environment_vars = [
      "UPLOADED_FOLDER=${local.uploaded_folder}",
      "GPU_FAMILY=${var.gpu_family}",
      "GATED_UNIT=${local.gated_unit[source.name]}",
      "SENTINEL_ENABLED=${var.sentinel_enabled}",
    ]
  }

  provisioner "shell" {
    only            = ["amazon-ebs.ubuntu2404-runner"]
    script          = "${path.root}/provisioners/install-actions-runner.sh"
    execute_command = local.as_root
    environment_vars = [
      "UPLOADED_FOLDER=${local.uploaded_folder}",
      "ACTIONS_RUNNER_VERSION=${var.actions_runner_version}",
      "ACTIONS_RUNNER_SHA256=${var.actions_runner_sha256}",
    ]
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/start-nvidia-driver.sh"
    execute_command = local.as_root
    environment_vars = [
      "HAS_GPU=${local.has_gpu}",
      "FABRIC_MANAGER=${local.fabric_manager}",
    ]
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/run-validation.sh"
    execute_command = local.as_root
    environment_vars = [
      "REPORT_FOLDER=${local.remote_report_folder}",
      "LEVEL=standard",
      "HAS_GPU=${local.has_gpu}",
    ]
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/clean-image.sh"
    execute_command = local.as_root
    environment_vars = [
      "UPLOADED_FOLDER=${local.uploaded_folder}",
    ]
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/run-validation.sh"
    execute_command = local.as_root
    environment_vars = [
      "REPORT_FOLDER=${local.remote_report_folder}",
      "LEVEL=image",
      "HAS_GPU=${local.has_gpu}",
    ]
  }

  provisioner "file" {
    direction   = "download"
    source      = "${local.remote_report_folder}/"
    destination = "${var.report_folder}/"
  }

  provisioner "shell" {
    script          = "${path.root}/provisioners/end-with-verdict.sh"
    execute_command = local.as_root
    environment_vars = [
      "REPORT_FOLDER=${local.remote_report_folder}",
      "HAS_GPU=${local.has_gpu}",
    ]
  }

  post-processor "manifest" {
    output     = "${var.report_folder}/manifest.json"
    strip_path = true
  }
}
