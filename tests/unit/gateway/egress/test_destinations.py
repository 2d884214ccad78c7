# The guard: names are looked up once, and every address that they lead to must be open.

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from ipaddress import ip_address, ip_network

import pytest

from gateway.egress.destinations import Guard, SystemResolver, Unreachable
from gateway.egress.urls import read_url
from protocol.errors import BadRequest

INSIDE = (ip_network("10.20.0.0/16"),)


class Names:
    """A scripted resolver: its answers in turn, the last one for ever."""

    def __init__(self, *answers: Sequence[str] | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int, team_id: str) -> Sequence[str]:
        self.asked.append(host)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_name_leads_to_checked_addresses() -> None:
    """One look-up, and its answer is what is connected to."""
    names = Names(["93.184.216.34", "2606:4700::1111"], ["127.0.0.1"])

    found = await Guard(resolve=names).find(read_url("https://hooks.example.com/x"))

    assert found.addresses == (ip_address("93.184.216.34"), ip_address("2606:4700::1111"))
    assert names.asked == ["hooks.example.com"]


@pytest.mark.parametrize(
    "answer", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"], ["fe80::1%2"]]
)
async def test_one_closed_address_closes_the_name(answer: list[str]) -> None:
    """Who can choose the order of answers could choose which one is used."""
    with pytest.raises(Unreachable, match="where callbacks may not go"):
        await Guard(INSIDE, Names(answer)).find(read_url("https://hooks.example.com/"))


@pytest.mark.parametrize("text", ["https://127.0.0.1/", "https://[::1]/", "https://10.0.0.1:8443/", "https://0.0.0.0/"])
async def test_an_address_needs_no_look_up(text: str) -> None:
    """A closed address is refused as it stands."""
    names = Names(["93.184.216.34"])

    with pytest.raises(Unreachable):
        await Guard(INSIDE, names).find(read_url(text))

    assert names.asked == []


@pytest.mark.parametrize(
    ("text", "answer", "is_open"),
    [
        ("https://hooks.example.com/", "93.184.216.34", True),
        ("https://hooks.example.com:8443/", "93.184.216.34", True),
        ("https://hooks.example.com:25/", "93.184.216.34", False),
        ("https://hooks.example.com:80/", "93.184.216.34", False),
        ("http://hooks.example.com/", "93.184.216.34", False),
        ("http://hooks.example.com:8443/", "93.184.216.34", False),
        ("http://billing/", "10.20.1.1", True),
        ("http://billing:99/", "10.20.1.1", True),
        ("http://10.20.1.1:99/", "", True),
        ("http://10.21.1.1/", "", False),
    ],
)
async def test_plain_http_and_low_ports_are_for_open_ranges(text: str, answer: str, is_open: bool) -> None:
    """Outside goes https alone, to 443 or a port that no old service listens on."""
    guard = Guard(INSIDE, Names([answer]))

    if is_open:
        assert (await guard.find(read_url(text))).addresses
    else:
        with pytest.raises(Unreachable):
            await guard.find(read_url(text))


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (["93.184.216.34"], True),
        (["127.0.0.1"], False),
        ([], False),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), False),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), True),
        (TimeoutError(), True),
    ],
)
async def test_a_url_is_checked_when_it_is_set(answer: list[str] | Exception, passes: bool) -> None:
    """A name that does not exist is a mistake; a name server that does not answer is none of the admin's."""
    guard = Guard(resolve=Names(answer))

    if passes:
        assert await guard.check("https://Hooks.example.com", "webhook_url") == "https://hooks.example.com/"
    else:
        with pytest.raises(BadRequest) as refusal:
            await guard.check("https://hooks.example.com", "webhook_url")
        assert (refusal.value.param, refusal.value.code) == ("webhook_url", "invalid_callback_url")


async def test_an_unknown_http_name_does_not_pass() -> None:
    """Nothing shows that it leads inside."""
    with pytest.raises(BadRequest):
        await Guard(INSIDE, Names(TimeoutError())).check("http://billing/", "webhook_url")


async def test_the_system_resolver_answers() -> None:
    """localhost is a name like any other: looked up, and closed; a label that is too long is no name."""
    guard = Guard()

    with pytest.raises(Unreachable, match="loopback"):
        await guard.find(read_url("https://localhost/"))
    with pytest.raises(Unreachable, match="does not exist"):
        await guard.find(read_url(f"https://{'a' * 64}.example/"))


async def test_look_ups_that_hang_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many threads may be stuck and no more; each place is free again when its thread comes back."""
    stuck, asked = threading.Event(), []

    def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
        asked.append(host)
        stuck.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    resolver = SystemResolver(at_once=2)
    looks = [asyncio.create_task(resolver(f"host-{number}", 443)) for number in range(5)]  # type: ignore[arg-type]
    while len(asked) < 2:
        await asyncio.sleep(0.01)
    looks[0].cancel()  # whoever asked gives up; the thread is still stuck
    await asyncio.wait(looks[:1])
    held = len(asked)
    stuck.set()
    rest = await asyncio.gather(*looks[1:])

    assert held == 2
    assert rest == [["93.184.216.34"]] * 4


def test_a_name_that_leads_inside_is_not_told_where() -> None:
    """What addresses our names have is none of a team's business."""
    guard = Guard(resolve=Names(["10.1.2.3"]))

    with pytest.raises(BadRequest) as refusal:
        asyncio.run(guard.check("https://database.internal/", "callback_url"))

    assert "10.1.2.3" not in refusal.value.message and "private" in refusal.value.message
