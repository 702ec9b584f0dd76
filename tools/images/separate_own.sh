#!/bin/bash
# Runs a command that installs packages into the environment of an image, /opt/tinkercloud, and copies the files that are new
# to /own, so that they are a layer of their own. uv's records of when they were built stay behind: a commit gives the same
# image in every build.
set -euo pipefail
files() { (cd /opt/tinkercloud && find . ! -type d | LC_ALL=C sort); }

files >/tmp/before
"$@"
sed -i '/uv_cache.json/d' /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/RECORD
rm -f /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/uv_cache.json
mkdir -p /own
files | LC_ALL=C comm -13 /tmp/before - | tar --create --directory /opt/tinkercloud --files-from - | tar --extract --directory /own
