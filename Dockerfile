# An image with TensorRT, and bisect-trt in it (docs/install.md). The base is an image with
# TensorRT's Python package and Python 3.11 or newer, such as NVIDIA's of 24.10 and later:
#   docker build --build-arg BASE=IMAGE -t bisect-trt .
#   docker run --rm --gpus all -v "$PWD:/work" bisect-trt run model.onnx --input real.npz
ARG BASE
FROM ${BASE}
# What the base lacks: TensorRT's runner copies buffers by cuda-python.
ARG PACKAGES="cuda-python>=12.6"
# Images of newer distributions mark their Python as managed by the distribution.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY pyproject.toml README.md LICENSE /src/
COPY bisect_trt /src/bisect_trt
RUN python3 -m pip install --no-cache-dir /src ${PACKAGES:+"$PACKAGES"} && rm -r /src
WORKDIR /work
ENTRYPOINT ["bisect-trt"]
CMD ["--help"]
