#!/usr/bin/env bash
# Builds images of the Dockerfile with buildah: needs Linux, root and Debian's packages, no Docker engine and no registry.
#
#   tools/images/build.sh [TARGET ...]     all targets by default; prints the name, size and digest of each
#   tools/images/build.sh --storage        print where they are, for `skopeo` (containers-storage:[...]NAME)
#
# The base is a minimal Debian with its own Python instead of python:3.11-slim-bookworm. The settings of this machine for
# pip and uv are mounted during the build and are not part of an image. A commit gives the same digest in every build, and
# layers have a fixed time, so that those of the dependencies stay the same from commit to commit.
#
# TORCH_INDEX: where the CPU build of torch comes from (see the Dockerfile); by default a folder of pip's find-links,
# PyTorch's index, or nowhere if that can't be reached. IMAGES_LAYOUT: an OCI layout that gets the images, uncompressed.
set -euo pipefail
cd "$(dirname "$0")/../.."

SUITE=bookworm
storage=${XDG_CACHE_HOME:-$HOME/.cache}/tinkercloud/images/layers
runroot=/run/tinkercloud-images
if [ "${1:-}" = --storage ]; then
  echo "overlay@$storage+$runroot"
  exit
fi
targets=("$@")
[ $# -gt 0 ] || targets=(api-server operator programs worker-cpu recipes worker)
revision=$(git rev-parse HEAD)
created=$(git log -1 --format=%cI)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' api_server/pyproject.toml)

if [ "$(id -u)" != 0 ]; then
  echo "tools/images/build.sh: buildah needs root here to make the base image; run it with sudo" >&2
  exit 1
fi
for program in buildah mmdebstrap skopeo; do
  if ! command -v "$program" >/dev/null; then
    echo "installing $program ..." >&2
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$program" >&2
  fi
done

buildah() {
  command buildah --root "$storage" --runroot $runroot --storage-driver overlay "$@"
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

locked_torch=$(sed -n '/^name = "torch"$/{n;s/version = "\(.*\)"/\1/p}' uv.lock)
wheels=()
if [ -z "${TORCH_INDEX+set}" ]; then
  TORCH_INDEX=https://download.pytorch.org/whl/cpu
  for folder in ${PIP_FIND_LINKS:-} $(python3 -m pip config get global.find-links 2>/dev/null || true); do
    if compgen -G "$folder/torch-$locked_torch+cpu-cp311-*_$(uname -m).whl" >/dev/null; then
      TORCH_INDEX=/wheels wheels=(--volume "$folder:/wheels:ro")
      break
    fi
  done
  if [ "$TORCH_INDEX" != /wheels ] && ! curl --silent --fail --max-time 20 --output /dev/null "$TORCH_INDEX/torch/"; then
    echo "no CPU build of torch $locked_torch can be reached: images for CPUs contain 2.5 GB of CUDA libraries" >&2
    TORCH_INDEX=
  fi
fi

# The most megabytes of each image: a dependency too many is noticed. Without a CPU build of torch, 2,600 more.
declare -A most=([api-server]=850 [operator]=400 [programs]=650 [worker-cpu]=2000 [recipes]=2300 [worker]=9000)
if [ -z "$TORCH_INDEX" ]; then
  most[worker-cpu]=4600 most[recipes]=4900
fi

for target in "${targets[@]}"; do
  name=localhost/tinkercloud-${target/api-server/api}:$version
  started=$SECONDS
  echo "building $name ..." >&2
  if ! buildah bud --isolation chroot --format oci --layers --timestamp 0 \
    --volume /etc/ssl/certs:/etc/ssl/certs:ro --volume "$home:/root:ro" "${wheels[@]}" \
    --build-arg BASE=localhost/tinkercloud-build-base:$SUITE --build-arg RUNTIME=localhost/tinkercloud-runtime-base:$SUITE \
    --build-arg "TORCH_INDEX=$TORCH_INDEX" \
    --label "org.opencontainers.image.version=$version" --label "org.opencontainers.image.revision=$revision" \
    --label "org.opencontainers.image.created=$created" \
    --target "$target" --tag "$name" . >"$home/log" 2>&1; then
    tail -n 40 "$home/log" >&2
    echo "$name was not built" >&2
    exit 1
  fi
  buildah images --no-trunc --format '{{.Name}}:{{.Tag}} {{.Size}} {{.Digest}}' "$name" \
    | sed "s/\$/ $((SECONDS - started)) s/"
  megabytes=$(buildah images --format '{{.Size}}' "$name" | sed 's/ \(.\)B$/\1/' | numfmt --from=si --to-unit=1000000)
  if [ "$megabytes" -gt "${most[$target]}" ]; then
    echo "$name has $megabytes MB, but at most ${most[$target]} are allowed; see \`most\` in tools/images/build.sh" >&2
    exit 1
  fi
  if [ -n "${IMAGES_LAYOUT:-}" ]; then
    skopeo copy --quiet --dest-oci-accept-uncompressed-layers \
      "containers-storage:[overlay@$storage+$runroot]$name" "oci:$IMAGES_LAYOUT:$target"
  fi
done
