# A way through an HTTP proxy: CONNECT, after which the socket leads to the upstream itself, TLS and all.

from __future__ import annotations

import asyncio
import re
import socket
from base64 import b64encode
from urllib.parse import unquote, urlsplit

LONGEST_ANSWER = 16 * 1024  # bytes of a proxy's answer
TAKEN = re.compile(rb"HTTP/1\.[01] 2\d\d[ \r]")


async def open_tunnel(opened: socket.socket, proxy: str, host: str, port: int) -> None:
    """Have the proxy at the other end of a socket connect it to ``host``. Raises OSError when it does not.

    What the proxy says of it is read to its last byte and no further: behind it the upstream speaks.
    """
    loop = asyncio.get_running_loop()
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"host: {place}", *_credentials(proxy), "", ""]
    await loop.sock_sendall(opened, "\r\n".join(lines).encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        piece = await loop.sock_recv(opened, 4096 if not answer else 1)
        answer += piece
        if not piece or len(answer) > LONGEST_ANSWER or b"\r\n\r\n" in answer[:-4]:
            raise ConnectionRefusedError("the proxy gave no answer that can be read")
    if TAKEN.match(answer) is None:
        raise ConnectionRefusedError("the proxy refused to connect")


def _credentials(proxy: str) -> list[str]:
    parts = urlsplit(proxy)
    if parts.username is None:
        return []
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return [f"proxy-authorization: Basic {b64encode(pair.encode()).decode()}"]
