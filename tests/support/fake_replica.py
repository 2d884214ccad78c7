# A process that announces itself as an engine of a pool and answers nothing: what a placer starts in tests.
# `--stays STATE`: it never takes calls; `--fails`: it says that it fails them; `--dies`: it ends at once; `--sleeps`:
# it is asked to sleep, and to wake up.

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

from protocol.serving.announcements import ACTIVE, DRAINING, SLEEPING, Announcement, pool_key, signed

EVERY = 0.1  # seconds


def main() -> int:
    """Announce until SIGTERM comes."""
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--fleet-pool", "--instance-id", "--port", "--warm-up", "--drain-seconds", "--stays"):
        parser.add_argument(flag)
    for flag in ("--fails", "--dies", "--sleeps"):
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
    states = {"now": told.stays or ACTIVE}
    port = answer_sleep(states) if told.sleeps else os.getpid() % 10_000 + 10_000
    instance_id, number = f"{told.instance_id}-{secrets.token_hex(4)}", 0
    while len(ending) < 5:
        if ending:
            ending.append(0)  # a few heartbeats more
        number += 1
        said = Announcement(
            pool=told.fleet_pool,
            instance_id=instance_id,
            base_url=f"http://127.0.0.1:{port}/v1",
            model=told.model,
            version=str(os.getpid()),  # by which tests find it
            state=DRAINING if ending else states["now"],
            number=number,
            sent_at=time.time(),
            answered=number,
            failed=number if told.fails else 0,
        )
        key, value = pool_key(said.pool).encode(), signed(said, os.environ["TOLLGATE_FLEET_SECRET"])
        write(redis, b"HSET", key, instance_id.encode(), value)
        time.sleep(EVERY)
    write(redis, b"HDEL", pool_key(told.fleet_pool).encode(), instance_id.encode())
    return 0


def answer_sleep(states: dict[str, str]) -> int:
    """Let requests say which state it is in; return the port where it listens."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            is_known = self.headers["authorization"] == f"Bearer {os.environ['TOLLGATE_ENGINE_SECRET']}"
            if is_known:
                states["now"] = {"/sleep": SLEEPING, "/wake_up": ACTIVE}[self.path]
            self.send_response(200 if is_known else 401)
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
