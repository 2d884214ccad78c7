# The socket that clients connect to: how it is opened, how many descriptors its connections may take, and how it is
# closed behind the last that came.

from __future__ import annotations

import resource
import socket
import struct
from contextlib import suppress
from ctypes import addressof, create_string_buffer

BACKLOG = 2048
UNREAD = 60.0  # seconds that a client may leave all that was sent unread
MOST_DESCRIPTORS = 1 << 20  # a hard limit may be a billion, which no process needs
OWN_SHARE = 4  # one in so many descriptors is not for clients: upstreams, Postgres, files
SO_ATTACH_FILTER = 26  # asm-generic/socket.h


def open_socket(host: str, port: int, unread: float = UNREAD) -> socket.socket:
    """Return a socket that listens; raise OSError when the port is taken.

    A client that takes nothing of what was sent for ``unread`` seconds has left: the kernel closes its connection.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it; every connection inherits it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unread * 1000))
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def raise_descriptor_limit() -> None:
    """Let this process, and those it starts from now on, open as many files and sockets as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def has_descriptors_left(newest: int) -> bool:
    """Whether a client's connection may keep the descriptor ``newest``, which was the lowest that was free.

    A process without a free descriptor cannot reach its upstreams and stores, and cannot even accept a connection in
    order to close it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft == resource.RLIM_INFINITY or newest < soft - soft // OWN_SHARE


def close_door(listener: socket.socket) -> None:
    """Have the kernel take no new connection on a listening socket; those that it has begun to take still come.

    Closed right away, the socket would reset every connection in its queue, whose clients believe that they are
    connected and have sent their requests. So a filter first drops what asks for a new connection (SYN), the queue is
    emptied, and then the socket is closed: the client's kernel asks again after a second and is refused.

    Some kernels let only root (CAP_NET_ADMIN) filter TCP, so in a container there is no filter: then a client that
    connects in the instant between the last look into the queue and the socket's end is reset.
    """
    byte_13, mask, is_equal, give = 0x30, 0x54, 0x15, 0x06  # BPF: load a byte, and, jump if equal, return
    code = ((byte_13, 0, 0, 13), (mask, 0, 0, 0x12), (is_equal, 0, 1, 0x02), (give, 0, 0, 0), (give, 0, 0, 0xFFFFFFFF))
    program = create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(code), addressof(program)))
