# syntax=docker/dockerfile:1
# All images, one target each. From the root of the repository:
#   docker build --target operator --tag tinkercloud-operator:0.1.0 .
# Targets: api-server, operator, programs, worker (NVIDIA GPUs), worker-cpu.
# For a release, by digest: docs/operate/installation.md says how. Labels of the version and the commit come from the command
# line: they would change the layers that follow them.
ARG BASE=python:3.11-slim-bookworm
ARG RUNTIME=${BASE}

FROM ${BASE} AS workspace
COPY tools/uv-requirements.txt /tmp/
COPY tools/images/separate_own.sh /usr/local/bin/
RUN pip install --no-cache-dir --require-hashes --requirement /tmp/uv-requirements.txt
ENV PYC_INVALIDATION_MODE=UNCHECKED_HASH \
    UV_CACHE_DIR=/var/cache/uv \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_DEFAULT_GROUPS=1 \
    UV_PROJECT_ENVIRONMENT=/opt/tinkercloud \
    UV_PYTHON_DOWNLOADS=never
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

# The dependencies of an image are a layer of their own, which stays the same until uv.lock changes: an upgrade downloads
# only our packages, which `separate_own.sh` copies out of the environment.
FROM workspace AS deps-api-server
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-api --extra postgres --extra sdk --extra telemetry --no-install-workspace

FROM deps-api-server AS build-api-server
COPY protocol/src protocol/src
COPY crds/src crds/src
COPY kube/src kube/src
COPY planning/src planning/src
COPY api_server/src api_server/src
RUN --mount=type=cache,target=/var/cache/uv \
    separate_own.sh uv sync --frozen --package tinkercloud-api --extra postgres --extra sdk --extra telemetry --no-editable

FROM workspace AS deps-operator
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-operator --no-install-workspace

FROM deps-operator AS build-operator
COPY protocol/src protocol/src
COPY crds/src crds/src
COPY kube/src kube/src
COPY planning/src planning/src
COPY operator/src operator/src
RUN --mount=type=cache,target=/var/cache/uv \
    separate_own.sh uv sync --frozen --package tinkercloud-operator --no-editable

FROM workspace AS deps-programs
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-programs --no-install-workspace

FROM deps-programs AS build-programs
COPY protocol/src protocol/src
COPY programs/src programs/src
RUN --mount=type=cache,target=/var/cache/uv \
    separate_own.sh uv sync --frozen --package tinkercloud-programs --no-editable

FROM workspace AS deps-worker
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --package tinkercloud-worker --no-install-workspace --extra gpu --extra megatron --extra telemetry

FROM deps-worker AS build-worker
COPY protocol/src protocol/src
COPY worker_image/src worker_image/src
RUN --mount=type=cache,target=/var/cache/uv \
    separate_own.sh uv sync --frozen --package tinkercloud-worker --no-editable --extra gpu --extra megatron --extra telemetry

FROM workspace AS deps-worker-cpu
COPY tools/images/sync_on_cpu.sh tools/images/drop_idle_cuda.py /usr/local/bin/
# Where the CPU build of torch comes from, and its SHA-256: see sync_on_cpu.sh.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_SHA256=
RUN --mount=type=cache,target=/var/cache/uv \
    sync_on_cpu.sh --package tinkercloud-worker --no-install-workspace --extra megatron --extra telemetry

FROM deps-worker-cpu AS build-worker-cpu
COPY protocol/src protocol/src
COPY worker_image/src worker_image/src
RUN --mount=type=cache,target=/var/cache/uv \
    separate_own.sh sync_on_cpu.sh --package tinkercloud-worker --no-editable --extra megatron --extra telemetry

FROM deps-worker-cpu AS build-recipes
COPY protocol/src protocol/src
COPY programs/src programs/src
RUN --mount=type=cache,target=/var/cache/uv \
    separate_own.sh sync_on_cpu.sh --package tinkercloud-programs --no-editable --extra recipes

FROM ${RUNTIME} AS runtime
LABEL org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.title=Tinkercloud
# Nothing is installed in a running container. Libraries ask for the name of the user: platforms that choose the user ID have
# no entry for it, but the variables.
RUN if command -v pip; then pip uninstall --yes --quiet --root-user-action=ignore pip setuptools wheel; fi \
    && echo 'tinkercloud:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'tinkercloud:x:65532:' >> /etc/group
ENV HOME=/tmp \
    PATH=/opt/tinkercloud/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    USER=tinkercloud

FROM runtime AS api-server
COPY --from=deps-api-server /opt/tinkercloud /opt/tinkercloud
COPY --from=build-api-server /own /opt/tinkercloud
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["tinkercloud"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]

FROM runtime AS operator
COPY --from=deps-operator /opt/tinkercloud /opt/tinkercloud
COPY --from=build-operator /own /opt/tinkercloud
USER 65532:65532
EXPOSE 9090
ENTRYPOINT ["python", "-m", "tinkercloud_operator"]

# RLVE, for `programs.images` of BaseModels. Programs compute in session heads, so this image has no torch.
FROM runtime AS programs
COPY --from=deps-programs /opt/tinkercloud /opt/tinkercloud
COPY --from=build-programs /own /opt/tinkercloud
USER 65532:65532
ENTRYPOINT ["python", "-m"]
CMD ["tinkercloud_programs.rlve"]

FROM runtime AS worker-cpu
ENV OMP_WAIT_POLICY=PASSIVE
COPY --from=deps-worker-cpu /opt/tinkercloud /opt/tinkercloud
COPY --from=build-worker-cpu /own /opt/tinkercloud
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["python", "-m", "tinkercloud_worker"]
CMD ["/etc/tinkercloud/head.json"]

# Recipes of tinker-cookbook, for `programs.images` of BaseModels too. They import torch, and record the state of their code
# with git. The layers below are those of worker-cpu.
FROM worker-cpu AS recipes
USER root
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes git \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-recipes /own /opt/tinkercloud
USER 65532:65532
ENTRYPOINT ["python", "-m"]
CMD ["tinker_cookbook.recipes.sl_loop"]

# CUDA's libraries come with the locked torch, and the driver comes from the node. Triton compiles fused kernels at run
# time, which needs a C compiler and no nvcc.
FROM runtime AS worker
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OMP_WAIT_POLICY=PASSIVE
COPY --from=deps-worker /opt/tinkercloud /opt/tinkercloud
COPY --from=build-worker /own /opt/tinkercloud
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["python", "-m", "tinkercloud_worker"]
CMD ["/etc/tinkercloud/head.json"]
