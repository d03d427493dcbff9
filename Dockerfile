# The sidecar daemon, without torch. How to run it: docs/how_to/daemon.md. Build it in the folder of the source:
#
#     docker build --tag tierstore:0.6.0 .

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY tierstore tierstore
COPY hooks hooks
COPY daemon daemon
COPY deploy/install-daemon.sh deploy/daemon-requirements.txt deploy/
RUN deploy/install-daemon.sh /opt/tierstore

FROM python:${PYTHON}-slim
# The number, not the name, is what a trainer in another container shares with the daemon.
RUN groupadd --gid 10001 tierstore \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin tierstore \
    && install --directory --owner=10001 --group=10001 --mode=0700 /run/tierstore
# A virtual environment knows its own path: the same one here and there.
COPY --from=build /opt/tierstore /opt/tierstore
ENV PATH=/opt/tierstore/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TIERSTORE_PATH=/drive \
    TIERSTORE_SOCKET=/run/tierstore/tierstore.sock
USER 10001:10001
# The socket alone. /drive is no volume, and is not in the image: without the mount the daemon refuses to start, where
# an anonymous volume would fill the system disk.
VOLUME /run/tierstore
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s --retries=3 \
    CMD exec tierstore stat --socket "$TIERSTORE_SOCKET"
# The daemon is process 1 and handles SIGTERM itself; it has no children to reap.
ENTRYPOINT ["tierstore", "serve"]
