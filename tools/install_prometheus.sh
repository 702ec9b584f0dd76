#!/usr/bin/env bash
# Prints the folder of prometheus and promtool, with which tests try metrics and alerts. Loads them from Debian's package if
# they are missing, without its service.
set -euo pipefail

folder=${XDG_CACHE_HOME:-$HOME/.cache}/tinkercloud/prometheus
if [ ! -d "$folder" ]; then
  new=$(mktemp -d)
  trap 'rm -rf "$new"' EXIT
  apt-get update -qq >&2
  (cd "$new" && apt-get download -qq prometheus >&2 && dpkg -x prometheus_*.deb content)
  mkdir -p "$(dirname "$folder")"
  mv "$new/content" "$folder"
fi
echo "$folder/usr/bin"
