#!/usr/bin/env bash
# Installs PostgreSQL's programs, where they are missing (Debian, Ubuntu), without the database
# that Debian would make of its own accord.
set -euo pipefail

command -v initdb >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null && exit 0

[ "$(id -u)" = 0 ] || { echo "tests of the catalog need PostgreSQL: install postgresql" >&2; exit 1; }
settings=/etc/postgresql-common/createcluster.d/tinkercloud-tests.conf
mkdir -p "${settings%/*}"
trap 'rm -f "$settings"' EXIT
echo "create_main_cluster = false" >"$settings"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends postgresql >&2
