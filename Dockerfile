# dlo from its wheel, for a CPU or for NVIDIA GPUs:
#
#   docker build --target cpu -t dlo:cpu .
#   docker build --target cuda -t dlo:cuda .
#   docker run --rm -v "$PWD":/work dlo:cpu fit --config quickstart
#   docker run --rm --gpus all --shm-size 8g -v "$PWD":/work dlo:cuda doctor
#
# EXTRAS chooses the optional packages: --build-arg EXTRAS=llm,images,plots. The images have not been built here.
ARG PYTHON=3.12
ARG CUDA=cu130

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
RUN pip install --no-cache-dir build
COPY . .
RUN python -m build --wheel --outdir /wheels

# What both images share: a user without root, and the folder of the runs.
FROM python:${PYTHON}-slim AS base
ARG EXTRAS=llm,images,plots
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# DeepSpeed and torch.compile compile operators when they are used first.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home dlo && mkdir /work && chown dlo /work
WORKDIR /work

FROM base AS cpu
RUN pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu
COPY --from=wheel /wheels /wheels
RUN pip install "$(ls /wheels/*.whl)[${EXTRAS}]"
USER dlo
ENTRYPOINT ["dlo"]
CMD ["--help"]

FROM base AS cuda
ARG CUDA
RUN pip install torch torchvision --index-url https://download.pytorch.org/whl/${CUDA}
COPY --from=wheel /wheels /wheels
RUN pip install "$(ls /wheels/*.whl)[${EXTRAS},gpu]"
USER dlo
ENTRYPOINT ["dlo"]
CMD ["--help"]
