#!/bin/bash
# Stands in for Canonical's bootstrap.sh as far as it decides what containerd and the kubelet run with: its options, and that it
# writes containerd's configuration anew from one of two templates. The original: Ubuntu EKS images, /etc/eks/bootstrap.sh.
set -euo pipefail

runtime=containerd
cluster=
ip_family=
ipv6_cidr=
kubelet_arguments=
while [ $# -gt 0 ]; do
  case "$1" in
    --container-runtime) runtime=$2 ;;
    --ip-family) ip_family=$2 ;;
    --service-ipv6-cidr) ipv6_cidr=$2 ;;
    --kubelet-extra-args) kubelet_arguments=$2 ;;
    --apiserver-endpoint | --b64-cluster-ca | --dns-cluster-ip | --use-max-pods) ;;
    *)
      # What it does not know is positional, and the first of those is the cluster.
      cluster=${cluster:-$1}
      shift
      continue
      ;;
  esac
  shift 2
done
: "${cluster:?CLUSTER_NAME is not defined}"
case "$ip_family" in
  '' | ipv4 | ipv6) ;;
  *)
    echo "Invalid IpFamily. Only ipv4 or ipv6 are allowed"
    exit 1
    ;;
esac
if [ "$ip_family" = ipv6 ] && [ -z "$ipv6_cidr" ]; then
  echo "Service Ipv6 Cidr must be provided when ip-family is specified as IPV6"
  exit 1
fi

mkdir -p /etc/containerd
case "$runtime" in
  containerd)
    sed 's,SANDBOX_IMAGE,602401143452.dkr.ecr.us-west-2.amazonaws.com/eks/pause:3.5,g' \
      </usr/local/share/eks/containerd-config.toml >/etc/containerd/config.toml
    ;;
  nvidia-container-runtime) cp /usr/local/share/eks/nvidia-runtime-config.toml /etc/containerd/config.toml ;;
  *)
    echo "Container runtime $runtime is not supported."
    exit 1
    ;;
esac
mkdir -p /var/snap/kubelet-eks
echo "$kubelet_arguments" >/var/snap/kubelet-eks/args
systemctl enable --now snap.kubelet-eks.daemon.service
