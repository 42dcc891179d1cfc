# slimectl for machines without a GPU:
#
#   docker build -t slimectl .
#   docker run --rm -v slimectl:/workspace slimectl run quickstart
#
# `docker build --target skypilot` makes the image for SkyPilot, which logs in by ssh and mounts buckets as root.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS installed
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_SYSTEM_PYTHON=1
# g++ compiles the embedded engine's kernels at its first start. KubeRay probes with wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ tini wget \
    && rm -rf /var/lib/apt/lists/*
# The dependencies come before the source, so that a change of the source does not install them again.
# KubeRay needs ray[default]: Ray's job server is not part of plain Ray.
ARG TORCH_OPTIONS=--torch-backend=cpu
ARG UV_VERSION=0.13.9
WORKDIR /tmp/slimectl
COPY pyproject.toml constraints.txt ./
RUN --mount=type=cache,target=/root/.cache \
    pip install --no-cache-dir "uv==${UV_VERSION}" \
    && uv pip install ${TORCH_OPTIONS} -c constraints.txt -r pyproject.toml 'ray[default]' \
        --extra quickstart --extra gguf --extra parquet --extra zstd --extra ray --extra tensorboard --extra wandb
COPY LICENSE README.md ./
COPY completions completions
COPY models models
COPY slimectl slimectl
# KubeRay starts Ray in a login shell, which would reset PATH.
RUN --mount=type=cache,target=/root/.cache \
    uv pip install --no-deps . \
    && uv pip check \
    && echo "export PATH=$PATH" > /etc/profile.d/slimectl.sh
# Any user of group 0 can write there, such as the one that OpenShift chooses.
ENV HOME=/home/slimectl USER=slimectl LOGNAME=slimectl PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --gid 0 --create-home slimectl \
    && mkdir -p /workspace \
    && chown 1000:0 /workspace \
    && chmod -R g=u /workspace /home/slimectl
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "slimectl"]
LABEL org.opencontainers.image.title="slimectl" \
      org.opencontainers.image.description="RL post-training of language models as composable command-line stages" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM installed AS skypilot
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends curl fuse3 netcat-openbsd openssh-server patch pciutils rsync sudo \
    && rm -rf /var/lib/apt/lists/*
ENV HOME=/root USER=root LOGNAME=root

FROM installed AS slimectl
USER 1000
