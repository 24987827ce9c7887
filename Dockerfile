# `solodg serve` on the CPU, by ONNX Runtime alone: no torch. The model is mounted, not built in:
#
#   solodg export RUN --onnx model.onnx
#   docker build --tag solodg-serve .
#   docker run --read-only --tmpfs /tmp --cap-drop ALL --publish 127.0.0.1:8000:8000 \
#     --volume "$PWD/model.onnx:/model/model.onnx:ro" solodg-serve
#
# Files of more than 1 MB in a form pass through /tmp, which is in memory there.
FROM python:3.11-slim

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

WORKDIR /app

COPY constraints.txt serve-requirements.txt ./
RUN pip install --constraint constraints.txt --requirement serve-requirements.txt

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
ARG VERSION=0.1.0
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SOLODG="$VERSION" pip install --no-deps . \
  && useradd --system --uid 10001 --no-create-home solodg
USER 10001

EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=20s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["solodg", "serve"]
CMD ["/model/model.onnx", "--host", "0.0.0.0", "--port", "8000"]
