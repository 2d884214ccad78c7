# One try over a real network: only to the address that was checked, and over whatever the receiver does.

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from email.utils import formatdate
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from gateway.egress.destinations import Guard
from gateway.webhooks import sender as sender_module
from gateway.webhooks.sender import Sender
from tests.support.receiver import DRIP, ENDLESS, HANG, RESET, SLOW_BODY, Receiver, answer, certificate_for, receiving

LOOPBACK = (ip_network("127.0.0.0/8"),)
HEADERS = {"webhook-id": "evt_1"}
NOW = 1_775_390_400.0


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """Somebody who listens."""
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds are one here."""
    monkeypatch.setattr(sender_module, "SEND_WITHIN", 1.0)


def names(*answers: Sequence[str]) -> Guard:
    """A guard whose resolver gives these answers in turn, the last one for ever."""
    left = list(answers)

    async def resolve(host: str, port: int, team_id: str) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return Guard(LOOPBACK, resolve)


async def test_a_receiver_gets_what_was_signed(receiver: Receiver) -> None:
    """One POST of the very bytes, with our headers and none of anybody else."""
    result = await Sender(Guard(LOOPBACK)).send(receiver.url("/a?b=%20c"), HEADERS, b'{"x": 1}', NOW)

    assert result.is_delivered and result.status == 204 and result.error is None
    (delivery,) = receiver.deliveries
    assert (delivery.line, delivery.body) == ("POST /a?b=%20c HTTP/1.1", b'{"x": 1}')
    assert delivery.headers.keys() == {
        "host",
        "webhook-id",
        "content-type",
        "user-agent",
        "accept",
        "accept-encoding",
        "content-length",
        "connection",
    }


async def test_the_second_answer_of_a_name_is_never_used(receiver: Receiver) -> None:
    """A name that leads to an open address when checked, and to a closed one a moment later, leads nowhere."""
    left = [["127.0.0.2"], ["127.0.0.1"]]  # only the first is open, and nobody listens there

    async def resolve(host: str, port: int, team_id: str) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    sender = Sender(Guard([ip_network("127.0.0.2/32")], resolve))
    results = [await sender.send(receiver.url(host="rebinding.example"), HEADERS, b"{}", NOW) for _ in range(3)]

    assert [str(result.error)[:13] for result in results] == ["No connection", "The URL leads", "The URL leads"]
    assert receiver.connections == 0


async def test_the_connection_goes_where_the_first_answer_led(receiver: Receiver) -> None:
    """Looked up once: an answer that comes later, to whomever, changes nothing."""
    guard = names(["127.0.0.1"], ["127.0.0.9"])

    result = await Sender(guard).send(receiver.url(host="rebinding.example"), HEADERS, b"{}", NOW)

    assert result.is_delivered
    assert receiver.deliveries[0].headers["host"] == f"rebinding.example:{receiver.port}"


async def test_no_socket_is_opened_for_another_address() -> None:
    """Whatever the client library comes up with, only what was checked is connected to."""
    pinned = sender_module._Pinned((ip_address("127.0.0.1"),))
    family, kind = socket.AF_INET, socket.SOCK_STREAM

    pinned.open_socket((family, kind, 6, "", ("127.0.0.1", 80))).close()
    with pytest.raises(OSError, match="not an address that was checked"):
        pinned.open_socket((family, kind, 6, "", ("127.0.0.2", 80)))


async def test_tls_is_for_the_name_though_the_address_is_pinned(tmp_path: Path) -> None:
    """The receiver hears the name (SNI), and its certificate must be for it."""
    server, client = certificate_for("hooks.example.com", tmp_path)
    async with receiving(server) as receiver:
        right = await Sender(names(["127.0.0.1"]), client).send(
            receiver.url(host="hooks.example.com"), HEADERS, b"{}", NOW
        )
        wrong = await Sender(names(["127.0.0.1"]), client).send(
            receiver.url(host="other.example.com"), HEADERS, b"{}", NOW
        )
        unknown = await Sender(names(["127.0.0.1"])).send(receiver.url(host="hooks.example.com"), HEADERS, b"{}", NOW)

    assert right.is_delivered
    assert [delivery.server_name for delivery in receiver.deliveries] == ["hooks.example.com"]
    assert "certificate" in str(wrong.error) and "certificate" in str(unknown.error)


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/", "http://localhost:{port}/", "https://[::1]:{port}/"])
async def test_without_leave_nothing_connects_inside(receiver: Receiver, url: str) -> None:
    """The guard speaks before a socket is opened."""
    result = await Sender(Guard()).send(url.format(port=receiver.port), HEADERS, b"{}", NOW)

    assert "loopback" in str(result.error)
    assert receiver.connections == 0


async def test_redirects_are_not_followed(receiver: Receiver) -> None:
    """Not even to the receiver itself: a redirect is a failure."""
    target = receiver.url("/elsewhere")
    receiver.acts = [answer(307, f"location: {target}"), answer(302, "location: http://169.254.169.254/latest")]

    results = [await Sender(Guard(LOOPBACK)).send(receiver.url(), HEADERS, b"{}", NOW) for _ in range(2)]

    assert [result.status for result in results] == [307, 302]
    assert all("redirect" in str(result.error) for result in results)
    assert receiver.paths() == ["/hook", "/hook"]


async def test_proxies_of_the_environment_are_not_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would connect wherever it is asked to, unchecked."""
    async with receiving() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url(""))
        result = await Sender(Guard(LOOPBACK)).send(receiver.url(), HEADERS, b"{}", NOW)

    assert result.is_delivered
    assert proxy.connections == 0


@pytest.mark.parametrize("act", [HANG, DRIP])
async def test_a_try_ends_in_time(receiver: Receiver, short_patience: None, act: bytes) -> None:
    """Neither silence nor headers without end hold us longer than our patience."""
    receiver.acts = [act]

    result = await asyncio.wait_for(Sender(Guard(LOOPBACK)).send(receiver.url(), HEADERS, b"{}", NOW), 30)

    assert result.status is None
    assert result.error == "No answer within 1 seconds."


async def test_a_name_server_that_hangs_ends_in_time(short_patience: None) -> None:
    """Looking up is part of the try."""

    async def resolve(host: str, port: int, team_id: str) -> Sequence[str]:
        await asyncio.sleep(60)
        return ["127.0.0.1"]

    result = await asyncio.wait_for(
        Sender(Guard(LOOPBACK, resolve)).send("https://slow.example/", HEADERS, b"{}", NOW), 30
    )

    assert result.error is not None and result.status is None


@pytest.mark.parametrize("act", [ENDLESS, SLOW_BODY])
async def test_a_body_is_not_waited_for(receiver: Receiver, act: bytes) -> None:
    """Once a 2xx is here it is delivered; of its body a few kilobytes are read."""
    receiver.acts = [act]

    result = await asyncio.wait_for(Sender(Guard(LOOPBACK)).send(receiver.url(), HEADERS, b"{}", NOW), 30)

    assert result.is_delivered
    while receiver.running:  # it ends because we closed
        await asyncio.sleep(0.01)
    assert receiver.sent < 32 * 1024 * 1024


async def test_a_body_that_outlasts_our_patience_is_delivered(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is for the answer, not for what follows it."""
    monkeypatch.setattr(sender_module, "SEND_WITHIN", 2.0)
    monkeypatch.setattr(sender_module, "READ_WITHIN", 3.0)
    receiver.acts = [SLOW_BODY]

    result = await Sender(Guard(LOOPBACK)).send(receiver.url(), HEADERS, b"{}", NOW)

    assert result.is_delivered


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (RESET, None),
        (b"nonsense\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\n", None),
        (answer(500), 500),
        (answer(404, body=b"x" * 100_000), 404),
        (answer(410), 410),
    ],
)
async def test_whatever_else_comes_is_a_failure(receiver: Receiver, act: bytes, status: int | None) -> None:
    """Told in words that name no byte of the answer: it is none of the admin's to read."""
    receiver.acts = [act]

    result = await Sender(Guard(LOOPBACK)).send(receiver.url(), HEADERS, b"{}", NOW)

    assert not result.is_delivered
    assert result.status == status
    assert result.error and "yyy" not in result.error and "nonsense" not in result.error


async def test_a_receiver_that_is_not_there_is_a_failure() -> None:
    """A port that nobody listens on."""
    result = await Sender(Guard(LOOPBACK)).send("http://127.0.0.1:9/", HEADERS, b"{}", NOW)

    assert "No connection" in str(result.error)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("120", 120.0),
        (formatdate(NOW + 90, usegmt=True), 90.0),
        (formatdate(NOW - 90, usegmt=True), 0.0),
        ("soon", None),
        ("-5", None),
        ("9" * 40, None),
    ],
)
async def test_retry_after_is_read(receiver: Receiver, said: str, seconds: float | None) -> None:
    """Seconds or a date; anything else says nothing."""
    receiver.acts = [answer(503, f"retry-after: {said}")]

    result = await Sender(Guard(LOOPBACK)).send(receiver.url(), HEADERS, b"{}", NOW)

    assert result.retry_after == seconds


async def test_a_url_that_is_none_is_a_failure() -> None:
    """What an older release stored may be no URL any more."""
    result = await Sender(Guard(LOOPBACK)).send("https://user@hooks.example.com/", HEADERS, b"{}", time.time())

    assert "user name" in str(result.error)
