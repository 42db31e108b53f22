#!/usr/bin/env bash
# Gives containerd on Canonical's EKS image a handler for the runtime class `nvidia`.
#
# bootstrap.sh writes containerd's configuration anew when the node joins, from one of two templates of the image. The handler
# goes into the template of the default runtime, which has the pause image, the folders of the CNI and the kubelet's
# cgroup driver; that of `--container-runtime nvidia-container-runtime` has none of them (canonical/ubuntu-cloud-docs#389), and
# bootstrap.sh then sets application clocks, which ends the join on GPUs that have others.
set -euo pipefail

template=/usr/local/share/eks/containerd-config.toml
bootstrap=/etc/eks/bootstrap.sh
if [ ! -e "$template" ] || ! grep --quiet --fixed-strings "$template" "$bootstrap"; then
  echo "$bootstrap does not configure containerd from $template: this is another image than this provisioner knows" >&2
  exit 1
fi
if grep --quiet 'runtimes\.nvidia\]' "$template"; then
  echo "$template has a handler nvidia already" >&2
  exit 1
fi

version=$(sed --quiet 's/^version *= *\([0-9]*\).*/\1/p' "$template")
case "$version" in
  2) plugin=io.containerd.grpc.v1.cri ;;
  3) plugin=io.containerd.cri.v1.runtime ;;
  *)
    echo "$template is of version '$version'; expected 2 or 3" >&2
    exit 1
    ;;
esac
# The cgroup driver is the kubelet's, whichever handler runs a container; containerd's own default is cgroupfs.
systemd_cgroup=$(awk '/runtimes\.runc\.options\]/ { inside = 1; next } /^\[/ { inside = 0 } inside && $1 == "SystemdCgroup" { print $3 }' "$template")

cat >>"$template" <<EOF

[plugins."$plugin".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"

[plugins."$plugin".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
EOF
if [ -n "$systemd_cgroup" ]; then
  echo "SystemdCgroup = $systemd_cgroup" >>"$template"
fi
# What containerd cannot read must end the build here and not at a node's boot.
containerd --config "$template" config dump >/dev/null
