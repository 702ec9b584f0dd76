#!/usr/bin/env bash
# Prints the path of promtool, which tests the rules of alerts as Prometheus evaluates them. Loads it from Debian's package
# if it is missing, without installing the package's service.
set -euo pipefail

folder=${XDG_CACHE_HOME:-$HOME/.cache}/tinkercloud/promtool
if ! command -v promtool >/dev/null && [ ! -x "$folder/usr/bin/promtool" ]; then
  new=$(mktemp -d)
  trap 'rm -rf "$new"' EXIT
  apt-get update -qq >&2
  (cd "$new" && apt-get download -qq prometheus >&2)
  mkdir -p "$folder"
  dpkg -x "$new"/prometheus_*.deb "$folder" >&2
fi
command -v promtool || echo "$folder/usr/bin/promtool"
