#!/bin/bash
# `uv sync --frozen` for images without a GPU. Arguments are those of `uv sync`.
#
# The locked torch is the CUDA build, with gigabytes of libraries that a CPU never loads: the CPU build of the same version
# takes its place.
#
# TORCH_INDEX: an index that has it, or a folder with its wheel. If it is empty, the CUDA build stays, with those of its
# libraries that it loads without a GPU. TORCH_SHA256: the hash of the wheel. Without it, the index is trusted.
set -euo pipefail
environment=${UV_PROJECT_ENVIRONMENT:-/opt/tinkercloud}

has_torch() { compgen -G "$environment/lib/python*/site-packages/torch" >/dev/null; }

if has_torch; then
  TORCH_INDEX=installed
fi
without="triton${TORCH_INDEX:+\|nvidia-.*\|cuda-.*\|torch}"
mapfile -t options < <(sed -n "s/^name = \"\($without\)\"\$/--no-install-package\n\1/p" uv.lock)
uv sync --frozen --inexact "${options[@]}" "$@"

if [ "$TORCH_INDEX" = installed ]; then
  exit
fi
if [ -z "$TORCH_INDEX" ]; then
  exec "$environment/bin/python" "$(dirname "$0")/drop_idle_cuda.py"
fi
torch=$(sed -n '/^name = "torch"$/{n;s/version = "\(.*\)"/torch==\1+cpu/p}' uv.lock)
echo "$torch${TORCH_SHA256:+ --hash=sha256:$TORCH_SHA256}" >/tmp/torch-cpu.txt
from=(--index-url "$TORCH_INDEX")
[ ! -d "$TORCH_INDEX" ] || from=(--no-index --find-links "$TORCH_INDEX")
uv pip install --python "$environment" --no-deps "${from[@]}" ${TORCH_SHA256:+--require-hashes} \
  --requirement /tmp/torch-cpu.txt
