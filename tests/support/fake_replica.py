# A process that announces itself as an engine of a pool and answers nothing: what a placer starts in tests.
# `--stays STATE`: it never takes calls; `--fails`: it says that it fails them; `--dies`: it ends at once.

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
import time
from urllib.parse import urlsplit

from protocol.serving.announcements import ACTIVE, DRAINING, Announcement, pool_key, signed

EVERY = 0.1  # seconds


def main() -> int:
    """Announce until SIGTERM comes."""
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--fleet-pool", "--instance-id", "--port", "--warm-up", "--drain-seconds", "--stays"):
        parser.add_argument(flag)
    for flag in ("--fails", "--dies"):
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
    instance_id, number = f"{told.instance_id}-{secrets.token_hex(4)}", 0
    while len(ending) < 5:
        if ending:
            ending.append(0)  # a few heartbeats more
        number += 1
        said = Announcement(
            pool=told.fleet_pool,
            instance_id=instance_id,
            base_url=f"http://127.0.0.1:{os.getpid() % 10_000 + 10_000}/v1",
            model=told.model,
            version=str(os.getpid()),  # by which tests find it
            state=DRAINING if ending else told.stays or ACTIVE,
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


def write(redis: socket.socket, *words: bytes) -> None:
    """Say a command to Redis, whose library would take longer to import than all else."""
    redis.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
    assert not redis.recv(1024).startswith(b"-")


if __name__ == "__main__":
    sys.exit(main())
