#!/usr/bin/env bash
# Installs the Debian packages of the tests that build images and run them on a real node, where
# they are missing. Needs root and apt-get; removes nothing.
set -euo pipefail

missing=()
need() { # PACKAGE FILE...: any of the files will do, whoever installed it
  local package=$1 file
  shift
  for file in "$@"; do
    [[ ! -e $file ]] || return 0
  done
  missing+=("$package")
}
program() { need "$1" {/usr/local,/usr,}/{sbin,bin}/"$2"; }
program buildah buildah
program runc runc
program debootstrap debootstrap
program iproute2 ip
need debian-archive-keyring /usr/share/keyrings/debian-archive-keyring.gpg
need containernetworking-plugins /usr/lib/cni/bridge
[[ ${#missing[@]} -gt 0 ]] || exit 0

if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
  printf 'note: the tests build no images and start no real node: that takes root and Debian'"'"'s %s\n' \
    "${missing[*]}" >&2
  exit 1
fi
printf '==> installing %s\n' "${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends --no-remove "${missing[@]}" >/dev/null
