# What a client may take of a server before it is known, on real sockets: the app behind them answers nearly at once.

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn

from protocol.serving.http_server import (
    LONGEST_HEAD,
    LONGEST_URL,
    MOST_HEADERS,
    MOST_PARAMETERS,
    MOST_PIPELINED,
    HttpProtocol,
)
from protocol.serving.listening import open_socket
from tests.support.raw_client import connect, read_all, tell
from tests.support.waiting import until

SOON = 0.3  # seconds


class HurriedProtocol(HttpProtocol):
    """Has the limits of time that a test can wait for."""

    head_within = SOON
    body_within = SOON
    body_rate = 100


class CatchingUp(HurriedProtocol):
    """Is patient with clients of a server that stood still."""

    catch_up = 20.0


class InNoTime(HurriedProtocol):
    """Gives a body less time than the loop's clock can tell."""

    body_within = 0.0001


class App:
    """Answers /open at once, /slow never, /stream never to the end, anything else when the whole body is here, /still
    after its whole loop has stood still."""

    def __init__(self) -> None:
        self.heard: list[str] = []  # paths of calls that have begun
        self.read: list[int] = []  # bytes of bodies that were read to their end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        self.heard.append(scope["path"])
        size, is_whole = 0, scope["path"] == "/open"
        while not is_whole:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            size += len(event["body"])
            is_whole = not event["more_body"]
        self.read.append(size)
        if scope["path"] == "/still":
            time.sleep(1.2)  # the keep-alive ends meanwhile, too
        if scope["path"] == "/slow":
            await asyncio.sleep(60)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        if scope["path"] == "/stream":
            await asyncio.sleep(60)
        await send({"type": "http.response.body", "body": b"k"})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def url(app: App) -> Iterator[str]:
    with serving(app, HurriedProtocol) as url:
        yield url


@contextmanager
def serving(app: App, protocol: type[HttpProtocol], keep_alive: int = 1) -> Iterator[str]:
    with open_socket("127.0.0.1", 0) as listener:
        config = uvicorn.Config(
            app, http=protocol, lifespan="off", log_config=None, timeout_keep_alive=keep_alive, loop="uvloop"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.force_exit = server.should_exit = True
        thread.join(10)


def head(more: str = "", path: str = "/", method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{more}\r\n".encode()


def read_answer(client: socket.socket) -> bytes:
    """Return one whole answer of the app."""
    answer = b""
    while not answer.endswith(b"\r\n\r\nok"):
        piece = client.recv(1000)
        assert piece, f"closed after {answer!r}"
        answer += piece
    return answer


def fault(answer: bytes) -> str:
    """Return the message of an error."""
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"])


def test_a_head_may_have_so_many_fields_and_no_more(url: str) -> None:
    """The last that is allowed is answered; beyond it the client hears 431 and is closed."""
    most = "connection: close\r\n" + "a: b\r\n" * (MOST_HEADERS - 2)
    answer = tell(url, head(most + "c: d\r\n", method="GET"))

    assert tell(url, head(most, method="GET")).startswith(b"HTTP/1.1 200 ")
    assert answer.startswith(b"HTTP/1.1 431 ") and str(MOST_HEADERS) in fault(answer)


def test_a_url_may_be_so_long_and_have_so_many_parameters(url: str) -> None:
    """Frameworks keep paths and parsed queries; a hundred thousand parameters fit into a head."""
    path = "/" + "a" * (LONGEST_URL - 1)
    query = "/?" + "&".join(["a=1"] * MOST_PARAMETERS)
    answers = [tell(url, head("connection: close\r\n", more)) for more in (path, query, path + "a", query + "&a=1")]

    assert [answer[9:12] for answer in answers] == [b"200", b"200", b"414", b"414"]


@pytest.mark.parametrize("end", [b"0\r\n" + b"a: b\r\n" * (MOST_HEADERS + 1), b"0\r\nx: " + b"y" * 2 * LONGEST_HEAD])
def test_trailers_of_a_body_have_the_bounds_of_a_head(url: str, end: bytes) -> None:
    """They are kept as headers are, in number and in bytes, and come after the head was found short enough."""
    answer = tell(url, head("transfer-encoding: chunked\r\n"), b"2\r\nhi\r\n", end)

    assert answer.startswith(b"HTTP/1.1 431 ")


def test_a_chunk_extension_without_an_end_is_refused(url: str) -> None:
    """It brings no byte of a body and must not keep a connection for ever."""
    answer = tell(url, head("transfer-encoding: chunked\r\n"), b"2\r\nhi\r\n3;", *[b"x" * 65536] * 8)

    assert answer.startswith(b"HTTP/1.1 431 ")


def test_half_a_head_is_refused_in_time(url: str) -> None:
    """A client that says nothing is closed in silence; one that has begun hears 408."""
    began = time.monotonic()
    silent, half = tell(url), tell(url, b"GET / HTTP/1.1\r\nx: ")

    assert silent == b"" and half.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began > 2 * SOON


def test_a_server_that_stood_still_lets_its_clients_catch_up(app: App) -> None:
    """They may have stood still with it, in a head, in a body, or between two requests."""
    with serving(app, CatchingUp) as url, connect(url) as idle, connect(url) as beginning, connect(url) as half:
        idle.sendall(head(path="/open", method="GET"))
        read_answer(idle)
        beginning.sendall(b"GET /half HTTP/1.1\r\nx: ")
        half.sendall(head("content-length: 1000\r\n"))
        until(lambda: "/" in app.heard)
        with connect(url) as other:
            other.sendall(head(path="/still", method="GET"))
            read_answer(other)
        beginning.sendall(b"\r\nhost: x\r\n\r\n")
        half.sendall(b"x" * 1000)
        idle.sendall(head(method="GET"))

        assert [read_answer(each)[:13] for each in (beginning, half, idle)] == [b"HTTP/1.1 200 "] * 3


@pytest.mark.parametrize("framing", ["content-length: 100000\r\n", "transfer-encoding: chunked\r\n"])
def test_a_body_that_does_not_come_is_refused_in_time(url: str, app: App, framing: str) -> None:
    """The call that reads it is told that its client is gone, and begins nothing."""
    answer = tell(url, head(framing))

    assert answer.startswith(b"HTTP/1.1 408 ") and "too slowly" in fault(answer)
    assert app.heard == ["/"] and app.read == []


def test_a_body_is_refused_however_little_of_its_time_is_left(app: App) -> None:
    """A wait that is shorter than the loop's clock can tell ends in a refusal, too."""
    with serving(app, InNoTime) as url:
        assert tell(url, head("content-length: 100000\r\n")).startswith(b"HTTP/1.1 408 ")


def test_a_body_may_take_its_time_as_long_as_it_comes(url: str, app: App) -> None:
    """So many bytes buy a second; a client that sends fewer is refused."""
    with connect(url) as steady, connect(url) as trickling:
        for client in (steady, trickling):
            client.sendall(head("content-length: 10000\r\n"))
        for _ in range(8):
            time.sleep(SOON / 2)
            steady.sendall(b"x" * 1250)
            with suppress(ConnectionError):
                trickling.sendall(b"x")

        assert read_answer(steady).startswith(b"HTTP/1.1 200 ")
        assert read_all(trickling).startswith(b"HTTP/1.1 408 ")
    assert app.read == [10_000]


@pytest.mark.parametrize("drops", [b"x", b"\r\n"], ids=["a body that nobody reads", "blank lines"])
def test_what_is_no_request_does_not_keep_an_answered_connection_open(url: str, drops: bytes) -> None:
    """It is closed as an idle one is, whatever trickles in: the rest of a body, or blank lines between requests."""
    framing = "content-length: 100000\r\n" if drops == b"x" else ""
    began = time.monotonic()
    with connect(url) as client:
        client.sendall(head(framing, "/open"))
        assert read_answer(client).startswith(b"HTTP/1.1 200 ")
        with suppress(ConnectionError):
            while time.monotonic() < began + 40:
                client.sendall(drops)
                time.sleep(0.05)

    assert time.monotonic() < began + 30


def test_a_stream_outlives_the_patience_for_heads_and_idle_connections(url: str, app: App) -> None:
    """The head of the next request may come in pieces while an answer is due: the timers of idleness end with it."""
    with connect(url) as client:
        client.sendall(head(method="GET") + b"GET /slow HT")
        assert read_answer(client).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"TP/1.1\r\nhost: x\r\n\r\n")
        until(lambda: "/slow" in app.heard)
        client.settimeout(2.0)  # longer than a connection may be idle here
        with pytest.raises(TimeoutError):
            client.recv(1000)


def test_requests_ahead_of_their_answers_are_bounded(url: str, app: App) -> None:
    """Thousands fit into what is read at once, and each would be kept until those before it are answered."""
    few, many = MOST_PIPELINED, 8000
    answers = tell(url, head(method="GET") * few)
    cut = tell(url, head("content-length: 2\r\n", "/slow") + b"{}" + head(method="GET") * many)

    assert answers.count(b"HTTP/1.1 200 ") == few
    assert cut == b""
    assert len(app.heard) <= few + 1


def test_a_refusal_is_never_mixed_into_another_answer(url: str) -> None:
    """A client would take the refusal for a part of the answer that runs, or for the whole answer of the call before
    it: such a connection is closed without a word."""
    with connect(url) as client:
        client.sendall(head(path="/stream", method="GET"))
        begun = client.recv(1000)
        client.sendall(b"nonsense\r\n\r\n")

        assert (begun + read_all(client)).count(b"HTTP/1.1") == 1
    fields = "a: b\r\n" * (MOST_HEADERS + 1)
    for second in (b"nonsense\r\n\r\n", head(fields), head("x: " + "y" * 2 * LONGEST_HEAD), b"GET /half"):
        assert tell(url, head(path="/slow", method="GET"), second) == b""


def test_the_rest_of_a_body_that_was_answered_is_not_answered_again(url: str) -> None:
    """The client would take the refusal for the answer to its next request."""
    with connect(url) as client:
        client.sendall(head("transfer-encoding: chunked\r\n", "/open"))
        assert read_answer(client).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"nonsense\r\n")

        assert read_all(client) == b""


def test_what_cannot_be_read_after_an_answer_is_refused_aloud(url: str) -> None:
    """Nothing else is due on the connection then, so the client takes the refusal for what it is."""
    for second in (b"nonsense\r\n\r\n", head("a: b\r\n" * (MOST_HEADERS + 1)), head(path="http://a:b:c/")):
        with connect(url) as client:
            client.sendall(head(method="GET"))
            assert read_answer(client).startswith(b"HTTP/1.1 200 ")
            client.sendall(second)

            assert read_all(client).startswith(b"HTTP/1.1 4")


OPENS_FILES = """
import os, resource, sys, socket, asyncio, uvicorn
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
from protocol.serving.http_server import HttpProtocol

async def app(scope, receive, send):
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]
    for file in files:
        os.close(file)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

listener = socket.socket(fileno=int(sys.argv[1]))
uvicorn.run(app, fd=listener.fileno(), http=HttpProtocol, lifespan="off", log_level="critical")
"""


def test_clients_never_take_a_servers_last_descriptors() -> None:
    """A server needs some for upstreams and stores: connections beyond are closed at once, without a turn of the
    processor for each moment that they wait; and idle ones give way to clients that ask."""
    with open_socket("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        fd = listener.fileno()
        process = subprocess.Popen([sys.executable, "-c", OPENS_FILES, str(fd)], pass_fds=(fd,))
        try:
            first = connect(url)
            first.sendall(head(method="GET"))
            assert read_answer(first).startswith(b"HTTP/1.1 200 ")
            crowd = [connect(url) for _ in range(150)]
            assert read_all(crowd[-1]) == b""
            before = cpu_seconds(process.pid)
            first.sendall(head(method="GET"))
            assert read_answer(first).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.5)
            assert cpu_seconds(process.pid) - before < 0.25
            until(lambda: tell_once(url).startswith(b"HTTP/1.1 200 "))  # idle ones make room, after a second
            assert read_all(crowd[0]) == b""
            for client in crowd:
                client.close()
        finally:
            process.kill()
            process.wait()


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tell_once(url: str) -> bytes:
    return tell(url, head("connection: close\r\n", method="GET"))


def test_a_server_takes_all_the_descriptors_that_the_system_gives() -> None:
    """A soft limit of 1,024, the usual one, is far below what thousands of streams need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource; from protocol.serving.listening import raise_descriptor_limit as go; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {min(hard, 4096)})); go(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == [str(min(hard, 4096))] * 2
