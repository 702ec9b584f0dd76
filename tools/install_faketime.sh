#!/usr/bin/env bash
# Prints the path of libfaketime, with which tests set the clock of the programs that they start. Installs it if it is
# missing, which needs root on Debian or Ubuntu.
set -euo pipefail

find_library() { find /usr/lib -path '*/faketime/libfaketimeMT.so.1' -print -quit 2>/dev/null; }

if [ -z "$(find_library)" ]; then
  apt-get update -qq >&2
  apt-get install -y -qq --no-install-recommends libfaketime >&2
fi
find_library | grep .
