# A client that sends what no SDK sends: bytes on a socket.

from __future__ import annotations

import socket


def connect(url: str, timeout: float = 20.0) -> socket.socket:
    """Return a connection to the server at ``url``."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=timeout)


def tell(url: str, *pieces: bytes) -> bytes:
    """Send bytes on a connection and return all that comes until it is closed."""
    with connect(url) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
        except ConnectionError:
            pass  # it had heard enough
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    """Return all that comes until the connection is closed."""
    answer = b""
    while True:
        try:
            if not (piece := client.recv(65536)):
                return answer
        except ConnectionResetError:
            return answer
        answer += piece
