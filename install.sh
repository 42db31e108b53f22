#!/bin/sh
# Installs gpu-validator on this machine: the package of a release where dpkg or rpm is there, else its binary into /usr/local/bin.
# What was downloaded is compared with the release's SHA256SUMS before anything is installed.
#
#     curl --proto '=https' --tlsv1.2 --fail --silent --show-error --location https://github.com/gpu-bringup/gpu-bringup/releases/latest/download/install.sh | sudo sh
#
# Options, after `sudo sh -s --`:
#     --version 1.2.3      this release and not the newest one
#     --to DIR             only the binary, into DIR; needs no root where DIR is writable
#     --sha256 SUM         the file must have this checksum as well, one that came another way
#     --releases-url URL   a mirror of https://github.com/gpu-bringup/gpu-bringup/releases
set -eu

# Written at a release.
version=''

stop() {
  echo "error: $1" >&2
  exit 1
}

# https, and the unencrypted protocol only for a mirror that was named so.
download() {
  protocols='=https'
  case $releases in
    http://*) protocols='=http,https' ;;
  esac
  curl --proto "$protocols" --proto-redir "$protocols" --fail --silent --show-error --location --retry 3 --max-time 300 \
    --output "$folder/$1" "$from/$1" || stop "$from/$1 could not be downloaded; nothing was installed"
}

verify() {
  sum=$(awk -v file="$1" '$2 == file { print $1 }' "$folder/SHA256SUMS")
  [ -n "$sum" ] || stop "SHA256SUMS of the release does not list $1; nothing was installed"
  for sum in "$sum" ${sha256:+"$sha256"}; do
    echo "$sum  $folder/$1" | sha256sum --check --status ||
      stop "$1 has another checksum than $sum; nothing was installed"
  done
}

# Everything is a function, so that a script that arrives in part does nothing.
main() {
  releases=https://github.com/gpu-bringup/gpu-bringup/releases to='' sha256=''
  while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || stop "$1 needs a value"
    case $1 in
      --version) version=$2 ;;
      --to) to=$2 ;;
      --sha256) sha256=$2 ;;
      --releases-url) releases=${2%/} ;;
      *) stop "unknown option $1, expected --version, --to, --sha256 or --releases-url" ;;
    esac
    shift 2
  done
  case $version in
    *[!0-9.]*) stop "--version is '$version', expected one such as 1.2.3" ;;
    '') from=$releases/latest/download ;;
    *) from=$releases/download/v$version ;;
  esac

  machine=$(uname -m)
  case $machine in
    x86_64) suffix='' ;;
    aarch64) suffix=-aarch64 ;;
    *) stop "there is no gpu-validator for $machine, expected x86_64 or aarch64" ;;
  esac
  [ "$(uname -s)" = Linux ] || stop "gpu-validator runs on Linux, this is $(uname -s)"
  for program in awk curl sha256sum; do
    command -v "$program" >/dev/null || stop "$program is missing on this machine"
  done

  if [ -n "$to" ]; then
    file=gpu-validator$suffix
  else
    [ "$(id -u)" -eq 0 ] || stop "installing takes root: sudo, or --to DIR for the binary alone"
    if command -v dpkg >/dev/null; then
      file=gpu-validator-$machine.deb
    elif command -v rpm >/dev/null; then
      file=gpu-validator-$machine.rpm
    else
      file=gpu-validator$suffix to=/usr/local/bin
    fi
  fi

  folder=$(mktemp -d)
  trap 'rm -rf -- "$folder"' EXIT
  download SHA256SUMS
  download "$file"
  verify "$file"
  installed=/usr/bin/gpu-validator
  case $file in
    *.deb) dpkg --install "$folder/$file" ;;
    *.rpm) rpm --upgrade --replacepkgs "$folder/$file" ;;
    *)
      mkdir -p "$to"
      install -m 0755 "$folder/$file" "$to/gpu-validator"
      installed=$to/gpu-validator
      ;;
  esac
  "$installed" --version || stop "$installed does not start on this machine"
  echo "installed $installed; \`gpu-validator run\` judges this node"
}

main "$@"
