#!/usr/bin/env bash
# Builds images of the Dockerfile with buildah: needs Linux, root and Debian's packages, no Docker engine and no registry.
#
#   tools/images/build.sh [TARGET ...]     all targets by default; prints the name, size and digest of each
#
# The base is a minimal Debian with its own Python instead of python:3.11-slim-bookworm. The settings of this machine for
# pip and uv are mounted during the build and are not part of an image. A commit gives the same digest in every build.
set -euo pipefail
cd "$(dirname "$0")/../.."

SUITE=bookworm
targets=("$@")
[ $# -gt 0 ] || targets=(api-server operator programs worker-cpu worker)
storage=${XDG_CACHE_HOME:-$HOME/.cache}/tinkercloud/images
revision=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
version=$(sed -n 's/^version = "\(.*\)"/\1/p' api_server/pyproject.toml)

if [ "$(id -u)" != 0 ]; then
  echo "tools/images/build.sh: buildah needs root here to make the base image; run it with sudo" >&2
  exit 1
fi
for program in buildah mmdebstrap; do
  if ! command -v "$program" >/dev/null; then
    echo "installing $program ..." >&2
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$program" >&2
  fi
done

buildah() {
  command buildah --root "$storage/layers" --runroot /run/tinkercloud-images --storage-driver overlay "$@"
}

# Makes an image from Debian's packages, unless it exists: a name, and the packages.
debian() {
  local image=localhost/$1 packages=$2 folder
  buildah inspect --type image "$image" >/dev/null 2>&1 && return
  echo "making the base image $image ($packages) ..." >&2
  folder=$(mktemp -d)
  mmdebstrap --quiet --variant=apt --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    "$SUITE" "$folder/root.tar"
  printf 'FROM scratch\nADD root.tar /\n' >"$folder/Dockerfile"
  buildah bud --quiet --isolation chroot --format docker --timestamp 0 --tag "$image" "$folder" >/dev/null
  rm -r "$folder"
}

debian tinkercloud-build-base:$SUITE python3,python3-pip,python3-venv,ca-certificates
debian tinkercloud-runtime-base:$SUITE python3,ca-certificates

# Mounted as the home folder of the build: nothing of it stays in an image.
home=$(mktemp -d)
trap 'rm -r "$home"' EXIT
mkdir -p "$home/.config/pip" "$home/.config/uv"
{
  echo '[global]'
  echo 'break-system-packages = true'
  python3 -m pip config list | sed -n "s/^global\.\(.*\)='\(.*\)'$/\1 = \2/p"
} >"$home/.config/pip/pip.conf"
echo 'system-certs = true' >"$home/.config/uv/uv.toml"

for target in "${targets[@]}"; do
  name=localhost/tinkercloud-${target/api-server/api}:$version
  started=$SECONDS
  echo "building $name ..." >&2
  if ! buildah bud --isolation chroot --format oci --timestamp "$SOURCE_DATE_EPOCH" \
    --volume /etc/ssl/certs:/etc/ssl/certs:ro --volume "$home:/root:ro" \
    --build-arg BASE=localhost/tinkercloud-build-base:$SUITE --build-arg RUNTIME=localhost/tinkercloud-runtime-base:$SUITE \
    --build-arg VERSION="$version" --build-arg REVISION="$revision" \
    ${TORCH_INDEX:+--build-arg "TORCH_INDEX=$TORCH_INDEX"} \
    --target "$target" --tag "$name" . >"$home/log" 2>&1; then
    tail -n 40 "$home/log" >&2
    echo "$name was not built" >&2
    exit 1
  fi
  buildah images --no-trunc --format '{{.Name}}:{{.Tag}} {{.Size}} {{.Digest}}' "$name" \
    | sed "s/\$/ $((SECONDS - started)) s/"
done
