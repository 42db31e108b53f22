# What the images are made of: the one place that names these versions. Packer reads the file by its name (*.auto.pkrvars.hcl); Renovate
# raises it (.github/renovate.json), and `newest-ami.yml` bakes once a week with what workflows/newest-versions.sh writes in its place.

# renovate: datasource=custom.nvidia-driver depName=nvidia-driver
nvidia_driver_version = "580.95.05"

# renovate: datasource=github-releases depName=NVIDIA/nvidia-container-toolkit
nvidia_container_toolkit_version = "1.18.2"

# GitHub stops sending jobs to a runner that is not updated within 30 days of a newer release:
# https://docs.github.com/en/actions/reference/runners/self-hosted-runners#requirements-for-self-hosted-runner-software-updates
# renovate: datasource=github-release-attachments depName=actions/runner
actions_runner_version = "2.337.0"
actions_runner_sha256  = "70920811a4f8ad4328818682bca5c6469c1c942fab52448868071d0063816613"
