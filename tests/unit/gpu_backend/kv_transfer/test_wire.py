# Engines know each other by their secret, which neither sends, and read no more than they asked for.

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from gpu_backend.kv_transfer.leases import BlockLeases
from gpu_backend.kv_transfer.tcp import MOST_CONNECTIONS, TcpTransfer
from gpu_backend.kv_transfer.wire import MAGIC, Link, Refused
from tests.support.engine import CountingRunner
from tests.support.kv_transfer import SECRET, CountingStore, HandClock, until


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def linked(ends: tuple[socket.socket, socket.socket], key: bytes, other_key: bytes) -> tuple[Link, Link]:
    """Return both ends of a connection; raises what the asking side raises."""
    found: list[Link] = []

    def answer() -> None:
        try:
            found.append(Link(ends[1], other_key, asks=False, patience=10))
        except (Refused, OSError):
            ends[1].close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        link = Link(ends[0], key, asks=True, patience=10)
    except BaseException:
        ends[0].close()
        raise
    finally:
        thread.join()
    return link, found[0]


def test_both_know_the_secret(ends: tuple[socket.socket, socket.socket]) -> None:
    """Messages then pass, with what follows them."""
    link, other = linked(ends, b"secret", b"secret")

    link.send({"op": "x"})
    assert other.receive() == ({"op": "x"}, memoryview(b""))
    other.send({"sums": []}, b"block")
    assert link.receive(5) == ({"sums": []}, memoryview(b"block"))


def test_another_secret_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    """Whichever side has it."""
    with pytest.raises((Refused, OSError)):
        linked(ends, b"secret", b"guess")


def test_what_comes_back_as_it_was_sent_proves_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    """An engine's own words, reflected, are not those of one that knows the secret."""

    def reflect() -> None:
        while data := ends[1].recv(100):
            ends[1].sendall(data)

    thread = threading.Thread(target=reflect)
    thread.start()
    with pytest.raises(Refused, match="secret"):
        Link(ends[0], b"secret", asks=True, patience=10)
    ends[0].close()
    thread.join()


def test_another_protocol_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    """It is told as such."""
    ends[1].sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with pytest.raises(Refused, match="another protocol"):
        Link(ends[0], b"secret", asks=True, patience=10)


def test_no_more_is_read_than_was_asked_for(ends: tuple[socket.socket, socket.socket]) -> None:
    """Memory is bounded by what the reader expects."""
    link, other = linked(ends, b"secret", b"secret")

    other.send({}, b"four")
    with pytest.raises(Refused, match="too long"):
        link.receive(3)


def test_a_message_that_is_sent_again_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    """Each has a number that its authentication covers."""
    link, other = linked(ends, b"secret", b"secret")
    link.send({"op": "x"})
    told = ends[1].recv(1000, socket.MSG_PEEK)
    other.receive()

    ends[0].sendall(told)
    with pytest.raises(Refused, match="changed"):
        other.receive()


def test_connections_are_bounded() -> None:
    """One more than there are places for is closed before a word."""
    transfer = TcpTransfer(CountingStore(CountingRunner(4)), "127.0.0.1", 0, SECRET)
    where = transfer.register("lease", b"salt", [])
    many = [socket.create_connection((where.host, where.port)) for _ in range(MOST_CONNECTIONS)]
    try:
        assert all(one.recv(len(MAGIC)) for one in many)
        with socket.create_connection((where.host, where.port)) as late:
            assert late.recv(1) == b""
        many.pop().close()

        def is_let_in() -> bool:
            with socket.create_connection((where.host, where.port)) as again:
                return again.recv(1) == MAGIC[:1]

        until(is_let_in)
    finally:
        for one in many:
            one.close()
        transfer.close()


def test_a_lease_is_read_by_its_tenant_alone() -> None:
    """Who knows its name and another salt finds nothing, and does not prolong it."""
    clock = HandClock()
    leases = BlockLeases(clock, seconds=30)
    leases.add("lease", b"salt", ((7, b"hash"),))
    clock.now += 29

    with leases.reading("lease", b"another") as foreign:
        assert foreign is None
    clock.now += 1
    assert leases.take_free() == ["lease"]


def test_a_lease_that_is_read_is_not_freed() -> None:
    """Its blocks stay until the copy is made, though its time is up; nothing new begins to read it."""
    clock = HandClock()
    leases = BlockLeases(clock, seconds=30)
    leases.add("lease", b"salt", ((7, b"hash"),))

    with leases.reading("lease", b"salt") as lease:
        assert lease is not None
        clock.now += 31
        assert leases.take_free() == []
        with leases.reading("lease", b"salt") as late:
            assert late is None
    assert leases.take_free() == ["lease"]
