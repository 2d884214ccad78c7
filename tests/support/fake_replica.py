# A process that announces itself as an engine of a pool and answers nothing: what a placer starts in tests.
# `--stays STATE`: it never takes calls; `--fails`: it says that it fails them; `--dies`: it ends at once; `--sleeps`:
# it is asked to sleep, to wake up, and to load another model: not `broken`; `hung` does not come, and for `wrong` it
# has another one.

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
import threading
import time
from urllib.parse import urlsplit

from protocol.serving.announcements import ACTIVE, DRAINING, SLEEPING, STARTING, Announcement, pool_key, signed

EVERY = 0.1  # seconds


def main() -> int:
    """Announce until SIGTERM comes."""
    parser = argparse.ArgumentParser()
    for flag in (
        "--model",
        "--fleet-pool",
        "--instance-id",
        "--port",
        "--warm-up",
        "--drain-seconds",
        "--stays",
        "--served-model-name",
    ):
        parser.add_argument(flag)
    for flag in ("--fails", "--dies", "--sleeps", "--allow-model-loading"):
        parser.add_argument(flag, action="store_true")
    told = parser.parse_args()
    if told.dies:
        return 1
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    where = urlsplit(os.environ["TOLLGATE_FLEET_REDIS"])
    redis = socket.create_connection((where.hostname, where.port))
    if where.password:
        write(redis, b"AUTH", where.password.encode())
    write(redis, b"SELECT", where.path.strip("/").encode() or b"0")
    start, number = secrets.token_hex(4), 0
    model = told.served_model_name or told.model
    being = [(told.fleet_pool, told.instance_id, model, told.stays or ACTIVE)]  # the last is what it is now
    port = answer_orders(being) if told.sleeps else os.getpid() % 10_000 + 10_000
    pool, name = told.fleet_pool, told.instance_id
    while len(ending) < 5:
        if ending:
            ending.append(0)  # a few heartbeats more
        number, before = number + 1, (pool, name)
        pool, name, model, state = being[-1]
        if (pool, name) != before:
            write(redis, b"HDEL", pool_key(before[0]).encode(), f"{before[1]}-{start}".encode())
        said = Announcement(
            pool=pool,
            instance_id=f"{name}-{start}",
            base_url=f"http://127.0.0.1:{port}/v1",
            model=model,
            version=str(os.getpid()),  # by which tests find it
            state=DRAINING if ending else state,
            number=number,
            sent_at=time.time(),
            answered=number,
            failed=number if told.fails else 0,
        )
        key, value = pool_key(said.pool).encode(), signed(said, os.environ["TOLLGATE_FLEET_SECRET"])
        write(redis, b"HSET", key, said.instance_id.encode(), value)
        time.sleep(EVERY)
    write(redis, b"HDEL", pool_key(pool).encode(), f"{name}-{start}".encode())
    return 0


def answer_orders(being: list[tuple[str, str, str, str]]) -> int:
    """Let requests say which state it is in, and as which replica; return the port where it listens."""
    import json
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            is_known = self.headers["authorization"] == f"Bearer {os.environ['TOLLGATE_ENGINE_SECRET']}"
            asked = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or "{}")
            *now, _ = being[-1]
            if asked.get("model") == "hung":
                being.append((*now, STARTING))
                time.sleep(60)
            is_done = is_known and asked.get("model") != "broken"
            if is_done and self.path == "/load_model":
                name = "another" if asked["model"] == "wrong" else asked.get("served_model_name", asked["model"])
                being.append((asked["fleet_pool"], asked["instance_id"], name, ACTIVE))
            elif is_done:
                being.append((*now, SLEEPING if self.path == "/sleep" else ACTIVE))
            self.send_response(200 if is_done else 400 if is_known else 401)
            self.send_header("content-length", "0")
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def write(redis: socket.socket, *words: bytes) -> None:
    """Say a command to Redis, whose library would take longer to import than all else."""
    redis.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
    assert not redis.recv(1024).startswith(b"-")


if __name__ == "__main__":
    sys.exit(main())
