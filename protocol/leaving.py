# A client that leaves ends what runs for it. Shared by everything of ours that answers over ASGI.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Client:
    """Whoever waits for an answer."""

    has_left: bool = False


@asynccontextmanager
async def ended_when_client_leaves(receive: Any) -> AsyncIterator[Client]:
    """Cancel what runs inside as soon as the client has gone, and swallow that cancellation.

    ``receive`` is ASGI's, once the whole body was read from it: all that can still come is ``http.disconnect``.
    """
    running = asyncio.current_task()
    assert running is not None
    client = Client()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        client.has_left = True
        running.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield client
    except asyncio.CancelledError:
        if not client.has_left or running.uncancel() > 0:
            raise
    finally:
        watching.cancel()
