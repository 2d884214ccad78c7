# uvicorn looks around ten times a second, which under callgrind is some ten times within a call. Here it does so every
# five seconds.
#
#   python -m benchmarks.seldom_ticks MODULE …      # as python -m MODULE … does

from __future__ import annotations

import asyncio
import runpy
import sys

import uvicorn

SECONDS = 5.0


def tick_seldom() -> None:
    """Have uvicorn look around seldom from now on."""
    on_tick = uvicorn.Server.on_tick

    async def on_seldom_tick(server: uvicorn.Server, counter: int) -> bool:
        await asyncio.sleep(SECONDS)
        return await on_tick(server, counter)

    uvicorn.Server.on_tick = on_seldom_tick  # type: ignore[method-assign]


if __name__ == "__main__":
    tick_seldom()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
