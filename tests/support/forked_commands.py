# `tollgate` for a script that runs it dozens of times: each command is forked from a process that has imported it, so
# that it takes a tenth of the CPU time. Everything else is as for a user: arguments, environment, output, exit status.

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST = 1 << 17  # bytes of arguments and environment
COMMAND = """#!{} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({})
    asked = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(server, [asked], [0, 1, 2])
    sys.exit(int(server.recv(8) or 1))
"""


@contextmanager
def forked_commands(folder: Path) -> Iterator[None]:
    """Have an executable ``tollgate`` in ``folder``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # Linux finds a name
        listener.listen()
        command = folder / "tollgate"
        command.write_text(COMMAND.format(sys.executable, listener.getsockname()))
        command.chmod(0o755)
        words = [sys.executable, "-m", "tests.support.forked_commands", str(listener.fileno())]
        server = subprocess.Popen(words, pass_fds=(listener.fileno(),))
        try:
            yield
        finally:
            server.kill()
            server.wait()


def serve(listener: socket.socket) -> None:
    """Run one command after the other, each in a process of its own."""
    import pydantic  # noqa: F401  (typer's, which imports it when a command runs)
    import rich.table  # noqa: F401

    import gateway.commands.keys
    import gateway.commands.teams  # noqa: F401
    from gateway.__main__ import main

    while True:
        client, _ = listener.accept()
        asked, descriptors, _, _ = socket.recv_fds(client, MOST, 3)
        if (pid := os.fork()) == 0:
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            sys.argv, environment, folder = json.loads(asked)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            main()  # ends by SystemExit
        for descriptor in descriptors:
            os.close(descriptor)
        client.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        client.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
