#!/usr/bin/env bash
# Writes what each image installs (CycloneDX, from uv.lock) and under which licences, into a folder.
#
# Licences are those of the packages in .venv: CUDA's libraries are listed where they are installed.
set -euo pipefail
cd "$(dirname "$0")/.."

PIP_LICENSES_VERSION=5.5.5
out=$1
uv=.uv/bin/uv
mkdir -p "$out"

# What the Dockerfile installs.
declare -A images=(
  [api]="--package tinkercloud-api --extra oidc --extra postgres --extra sdk"
  [operator]="--package tinkercloud-operator"
  [programs]="--package tinkercloud-programs"
  [worker]="--package tinkercloud-worker --extra gpu --extra megatron"
  [worker-cpu]="--package tinkercloud-worker --extra megatron $(
    sed -n 's/^name = "\(nvidia-.*\|cuda-.*\|triton\)"$/--no-emit-package \1/p' uv.lock | tr '\n' ' '
  )"
)
options=(--quiet --frozen --no-default-groups)
packages=()
for image in "${!images[@]}"; do
  read -ra wanted <<<"${images[$image]}"
  "$uv" export "${options[@]}" "${wanted[@]}" --format cyclonedx1.5 --output-file "$out/tinkercloud-$image.cdx.json"
  mapfile -t -O "${#packages[@]}" packages < <(
    "$uv" export "${options[@]}" "${wanted[@]}" --format requirements.txt --no-hashes --no-header --no-annotate \
      --no-emit-workspace | sed 's/[ =;].*//'
  )
done
"$uv" tool run --quiet --python .venv/bin/python "pip-licenses@$PIP_LICENSES_VERSION" --python .venv/bin/python \
  --format csv --with-urls --packages "${packages[@]}" >"$out/licenses.csv"
