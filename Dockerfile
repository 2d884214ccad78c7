# Two images from one file: `gateway` (gateway, worker, every tollgate command; no torch) and `engine` (gpu_backend).
#   docker build --target gateway -t tollgate .        docker build --target engine -t tollgate-engine .

ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /src
RUN python -m venv /opt/tollgate
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Nothing is installed whose digest is not written down (`make lock`), not even what builds our own package.
COPY locks locks
RUN /opt/tollgate/bin/pip install --require-hashes --only-binary :all: -r locks/gateway.txt
COPY pyproject.toml README.md ./
COPY protocol protocol
COPY router router
COPY billing billing
COPY gateway gateway
COPY migrations migrations
COPY gpu_backend gpu_backend
RUN /opt/tollgate/bin/pip install --no-deps --no-build-isolation .

FROM build AS build-engine
RUN /opt/tollgate/bin/pip install --require-hashes --only-binary :all: -r locks/engine.txt

FROM ${PYTHON} AS runtime
# Numbers rather than names, so that a cluster can tell that nobody here is root.
RUN groupadd --gid 10001 tollgate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/tollgate tollgate \
    && install -d -o 10001 -g 10001 -m 0700 /var/lib/tollgate
ENV PATH=/opt/tollgate/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /var/lib/tollgate
USER 10001:10001

FROM runtime AS engine
# Triton compiles kernels with the system's C compiler, and loads them from where it keeps them.
USER 0
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 -m 0700 /var/cache/tollgate
USER 10001:10001
ENV TRITON_CACHE_DIR=/var/cache/tollgate/triton
VOLUME /var/cache/tollgate
COPY --from=build-engine /opt/tollgate /opt/tollgate
EXPOSE 8100
CMD ["python", "-m", "gpu_backend", "--help"]

FROM runtime AS gateway
COPY --from=build /opt/tollgate /opt/tollgate
VOLUME /var/lib/tollgate
EXPOSE 8000
CMD ["tollgate", "--help"]
