#!/usr/bin/env bash
# Installs what a real node needs from the operating system, where it is missing (Debian, Ubuntu).
set -euo pipefail

missing=()
needs() { command -v "$1" >/dev/null || [ -x "$1" ] || missing+=("$2"); }

needs containerd containerd
needs runc runc
needs /usr/lib/cni/bridge containernetworking-plugins
needs iptables iptables
needs ip iproute2
needs debootstrap debootstrap
[ -n "${TINKERCLOUD_TEST_ASSEMBLED_IMAGES:-}" ] || needs docker-registry docker-registry

if [ ${#missing[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || { echo "a real node needs root, and: ${missing[*]}" >&2; exit 1; }
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >&2
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
fi
