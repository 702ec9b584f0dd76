# syntax=docker/dockerfile:1
# All images, one target each. From the root of the repository:
#   docker build --target operator --tag tinkercloud-operator:0.1.0 .
# Targets: api-server, operator, programs, worker (NVIDIA GPUs), worker-cpu.
# For a release, by digest: docs/operate/installation.md says how.
ARG BASE=python:3.11-slim-bookworm
ARG RUNTIME=${BASE}

FROM ${BASE} AS workspace
COPY tools/uv-requirements.txt /tmp/
RUN pip install --no-cache-dir --require-hashes --requirement /tmp/uv-requirements.txt
ENV PYC_INVALIDATION_MODE=UNCHECKED_HASH \
    UV_CACHE_DIR=/var/cache/uv \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_DEFAULT_GROUPS=1 \
    UV_PROJECT_ENVIRONMENT=/opt/tinkercloud \
    UV_PYTHON_DOWNLOADS=never
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
COPY pyproject.toml uv.lock ./
COPY api_server/pyproject.toml api_server/
COPY crds/pyproject.toml crds/
COPY distribution/pyproject.toml distribution/
COPY kube/pyproject.toml kube/
COPY operator/pyproject.toml operator/
COPY planning/pyproject.toml planning/
COPY programs/pyproject.toml programs/
COPY protocol/pyproject.toml protocol/
COPY worker_image/pyproject.toml worker_image/

# In each build stage, the dependencies are installed first because they seldom change. uv's records of when our packages
# were built are removed, so that a commit gives the same image in every build.
FROM workspace AS build-api-server
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-api --extra postgres --extra sdk --no-install-workspace
COPY protocol/src protocol/src
COPY crds/src crds/src
COPY kube/src kube/src
COPY planning/src planning/src
COPY api_server/src api_server/src
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-api --extra postgres --extra sdk --no-editable
RUN sed -i '/uv_cache.json/d' /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/RECORD \
    && rm /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/uv_cache.json

FROM workspace AS build-operator
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-operator --no-install-workspace
COPY protocol/src protocol/src
COPY crds/src crds/src
COPY kube/src kube/src
COPY planning/src planning/src
COPY operator/src operator/src
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-operator --no-editable
RUN sed -i '/uv_cache.json/d' /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/RECORD \
    && rm /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/uv_cache.json

FROM workspace AS build-programs
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-programs --no-install-workspace
COPY protocol/src protocol/src
COPY programs/src programs/src
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-programs --no-editable
RUN sed -i '/uv_cache.json/d' /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/RECORD \
    && rm /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/uv_cache.json

FROM workspace AS build-worker
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-worker --no-install-workspace --extra gpu --extra megatron
COPY protocol/src protocol/src
COPY worker_image/src worker_image/src
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-worker --no-editable --extra gpu --extra megatron
RUN sed -i '/uv_cache.json/d' /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/RECORD \
    && rm /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/uv_cache.json

FROM workspace AS build-worker-cpu
# The locked torch is the CUDA build, with gigabytes of libraries that a CPU never loads: the CPU build of the same
# version takes its place.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# SHA-256 of its file, as the index lists it next to the file's name. Without it, the index is trusted.
ARG TORCH_SHA256=
RUN --mount=type=cache,target=/var/cache/uv \
    sed -n 's/^name = "\(nvidia-.*\|cuda-.*\|triton\|torch\)"$/--no-install-package \1/p' uv.lock \
      | xargs uv sync --frozen --package tinkercloud-worker --no-install-workspace --extra megatron \
    && sed -n '/^name = "torch"$/{n;s/version = "\(.*\)"/torch==\1+cpu/p}' uv.lock \
      | sed "s/\$/${TORCH_SHA256:+ --hash=sha256:${TORCH_SHA256}}/" > /tmp/torch-cpu.txt \
    && uv pip install --python /opt/tinkercloud --no-deps --index-url "${TORCH_INDEX}" \
      ${TORCH_SHA256:+--require-hashes} --requirement /tmp/torch-cpu.txt
COPY protocol/src protocol/src
COPY worker_image/src worker_image/src
RUN --mount=type=cache,target=/var/cache/uv \
    uv pip install --python /opt/tinkercloud --no-deps ./protocol ./worker_image
RUN sed -i '/uv_cache.json/d' /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/RECORD \
    && rm /opt/tinkercloud/lib/python*/site-packages/tinkercloud_*.dist-info/uv_cache.json

FROM ${RUNTIME} AS runtime
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.title=Tinkercloud \
      org.opencontainers.image.version=${VERSION}
# Nothing is installed in a running container.
RUN if command -v pip; then pip uninstall --yes --quiet --root-user-action=ignore pip setuptools wheel; fi
ENV PATH=/opt/tinkercloud/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

FROM runtime AS api-server
COPY --from=build-api-server /opt/tinkercloud /opt/tinkercloud
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["tinkercloud"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]

FROM runtime AS operator
COPY --from=build-operator /opt/tinkercloud /opt/tinkercloud
USER 65532:65532
EXPOSE 9090
ENTRYPOINT ["python", "-m", "tinkercloud_operator"]

# RLVE, for `programs.images` of BaseModels. Programs compute in session heads, so this image has no torch.
FROM runtime AS programs
COPY --from=build-programs /opt/tinkercloud /opt/tinkercloud
USER 65532:65532
ENTRYPOINT ["python", "-m"]
CMD ["tinkercloud_programs.rlve"]

FROM runtime AS worker-cpu
ENV OMP_WAIT_POLICY=PASSIVE
COPY --from=build-worker-cpu /opt/tinkercloud /opt/tinkercloud
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["python", "-m", "tinkercloud_worker"]
CMD ["/etc/tinkercloud/head.json"]

# CUDA's libraries come with the locked torch, and the driver comes from the node. Triton compiles fused kernels at run
# time, which needs a C compiler and no nvcc.
FROM runtime AS worker
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OMP_WAIT_POLICY=PASSIVE
COPY --from=build-worker /opt/tinkercloud /opt/tinkercloud
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["python", "-m", "tinkercloud_worker"]
CMD ["/etc/tinkercloud/head.json"]
