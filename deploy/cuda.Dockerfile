# tileinfer with its backend for NVIDIA GPUs, as a container around a program that is built before, with the kernels
# for its GPUs in it (docs/gpu.md; here for an H100 or H200):
#
#   cargo xtask kernels --arch sm_90
#   TILEINFER_PACK_DIR=target/kernels cargo build --release --locked --package tileinfer-cli --features cuda
#   strip --strip-debug target/release/tileinfer
#   docker build -f deploy/cuda.Dockerfile -t tileinfer-cuda target/release
#   docker run --gpus all -p 8080:8080 -v models:/models tileinfer-cuda Qwen/Qwen3-8B
#
# The driver comes from the host, through NVIDIA's container toolkit. The C library of the system that built the program
# must not be newer than this one's, 2.36.

FROM docker.io/library/debian:bookworm-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home tileinfer \
    && install -d -o tileinfer /models
COPY tileinfer /usr/local/bin/tileinfer
USER 10001
ENV HF_HOME=/models NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute
VOLUME /models
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["tileinfer", "serve", "--address", "0.0.0.0:8080"]
