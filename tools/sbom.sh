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

# Writes the options of the `uv sync` that installs the dependencies of an image: its package and extras.
installed() {
  sed -n "/ AS \(deps\|build\)-$1\$/,/^FROM/p" Dockerfile \
    | sed -n 's/.*sync\(_on_cpu.sh\| --frozen\) \(.*\)--no-\(install-workspace\|editable\)\([^\\]*\).*/\2 \4/p' | head -n 1
}

options=(--quiet --frozen --no-default-groups)
packages=()
for image in api-server operator programs worker worker-cpu recipes; do
  read -ra wanted <<<"$(installed "$image")"
  if [ "$image" = worker-cpu ] || [ "$image" = recipes ]; then
    mapfile -t -O "${#wanted[@]}" wanted < <(
      sed -n 's/^name = "\(nvidia-.*\|cuda-.*\|triton\)"$/--no-emit-package\n\1/p' uv.lock
    )
  fi
  "$uv" export "${options[@]}" "${wanted[@]}" --format cyclonedx1.5 --output-file "$out/tinkercloud-$image.cdx.json"
  mapfile -t -O "${#packages[@]}" packages < <(
    "$uv" export "${options[@]}" "${wanted[@]}" --format requirements.txt --no-hashes --no-header --no-annotate \
      --no-emit-workspace | sed 's/[ =;].*//'
  )
done
"$uv" tool run --quiet --python .venv/bin/python "pip-licenses@$PIP_LICENSES_VERSION" --python .venv/bin/python \
  --format csv --with-urls --packages "${packages[@]}" >"$out/licenses.csv"
.venv/bin/python tools/vendored.py --licences >>"$out/licenses.csv"
