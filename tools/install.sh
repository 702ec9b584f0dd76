#!/usr/bin/env bash
# Installs the locked environment into .venv. Arguments go to `uv sync` (--group test, say).
#
# torch on PyPI is the CUDA build, with gigabytes of libraries a CPU never loads. Where pip's
# find-links folder holds the CPU build of the same version, that one is installed instead, and so is that of the index
# TORCH_INDEX, such as https://download.pytorch.org/whl/cpu.
set -euo pipefail
cd "$(dirname "$0")/.."

UV_VERSION=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' tools/uv-requirements.txt)
python=${PYTHON:-python3}
uv=.uv/bin/uv

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "tools/install.sh: $("$python" --version) is not supported; install Python 3.11, 3.12 or 3.13, and name it: PYTHON=python3.12 make install" >&2
  exit 1
}

if [ ! -x "$uv" ] || [ "$("$uv" --version | cut -d' ' -f2)" != "$UV_VERSION" ]; then
  echo "Installing uv $UV_VERSION into .uv ..." >&2
  "$python" -m venv .uv
  .uv/bin/python -m pip install --disable-pip-version-check --require-hashes --requirement tools/uv-requirements.txt
fi

locked_torch=$(sed -n '/^name = "torch"$/{n;s/version = "\(.*\)"/\1/p}' uv.lock)
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')

cpu_torch() {
  local folder
  for folder in ${PIP_FIND_LINKS:-} $("$python" -m pip config get global.find-links 2>/dev/null || true); do
    [ -d "$folder" ] || continue
    find "$folder" -name "torch-$locked_torch+cpu-$tag-*_$(uname -m).whl" -print -quit
  done | head -n 1
}

index=()
wheel=$(cpu_torch)
if [ -z "$wheel" ] && [ -n "${TORCH_INDEX:-}" ]; then
  wheel=torch==$locked_torch+cpu
  index=(--index-url "$TORCH_INDEX")
fi
options=(--frozen --all-packages --python "$python" --no-python-downloads "$@")
echo "Installing the packages of uv.lock into .venv, with torch $locked_torch (${wheel:-of PyPI}) ..." >&2
if [ -z "$wheel" ]; then
  "$uv" sync "${options[@]}"
else
  for package in torch $(sed -n 's/^name = "\(nvidia-.*\|cuda-.*\)"$/\1/p' uv.lock); do
    options+=(--no-install-package "$package")
  done
  "$uv" sync --inexact "${options[@]}"
  "$uv" pip install --python .venv --no-deps "${index[@]}" "$wheel"
fi
