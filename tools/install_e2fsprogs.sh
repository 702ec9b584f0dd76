#!/usr/bin/env bash
# Installs the programs of ext4 disks, where they are missing (Debian, Ubuntu).
set -euo pipefail

command -v mkfs.ext4 >/dev/null && exit 0

[ "$(id -u)" = 0 ] || { echo "tests of disks need e2fsprogs: install it" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends e2fsprogs >&2
