# Where the images may lie that an upstream fetches by itself.

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest

from gateway.calls.image_urls import AT_ONCE, LONGEST, MOST_HOSTS, OF_A_TEAM, ImageUrls
from gateway.core.settings import ProviderSettings
from gateway.egress.destinations import Guard
from gateway.upstreams.registry import ProviderRegistry
from protocol.chat import ChatRequest, ImagePart, ImageUrl, Message, TextPart
from protocol.errors import BadRequest, Overloaded, ServiceError
from router.catalog.targets import Endpoint, Route, Target
from tests.support.house import model

PUBLIC, METADATA, PRIVATE = "93.184.216.34", "169.254.169.254", "10.1.2.3"
NAMES = {"public.example": [PUBLIC], "inner.example": [PRIVATE], "both.example": [PUBLIC, METADATA]}
MAKER, LAN = "https://api.openai.com/v1", "http://gpu-0:8000/v1"


class Names:
    """A name server that counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int, team_id: str) -> Sequence[str]:
        """Return what a name leads to."""
        self.asked.append(host)
        if host == "slow.example":
            raise TimeoutError
        if host not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return NAMES[host]


def showing(*urls: str) -> ChatRequest:
    images = [ImagePart(ImageUrl(url)) for url in urls]
    return ChatRequest(model="m", messages=(Message("user", (TextPart("See."), *images)),))


def verdict(request: ChatRequest, *base_urls: str, names: Names | None = None, self_hosted: bool = False) -> object:
    """Return the base URLs that are left of a route, or the error."""
    settings = {
        str(place): ProviderSettings(
            name=str(place), format="openai", endpoints=(Endpoint("here", url),), self_hosted=self_hosted
        )
        for place, url in enumerate(base_urls)
    }
    targets = tuple(Target(model("m", name), one.endpoints[0]) for name, one in settings.items())
    images = ImageUrls(Guard(resolve=names or Names(), rule="images may not go"))
    try:
        route = asyncio.run(images.fit(request, 0, "team", Route("m", targets, "named"), ProviderRegistry(settings)))
    except ServiceError as exc:
        return exc
    return [target.endpoint.base_url for target in route.targets]


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://public.example/a.png",
        "file:///etc/passwd",
        "ftp://public.example/a.png",
        "gopher://127.0.0.1:6379/_x",
        "//public.example/a.png",
        "/etc/passwd",
        "",
        "https://127.0.0.1/a.png",
        "https://[::1]/a.png",
        "https://[::ffff:169.254.169.254]/",
        "https://[64:ff9b::7f00:1]/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://127.1/",
        "https://0/",
        "https://169.254.169.254/",
        "https://168.63.129.16/",
        "https://100.64.0.1/",
        "https://10.0.0.1/a.png",
        "https://inner.example/a.png",
        "https://both.example/a.png",
        "https://nowhere.example/a.png",
        "https://user@public.example/a.png",
        "https://public.example#@inner.example/",
        "https://public.example\\@inner.example/",
        "https://public.example:22/a.png",
        "https://public.example\t/a.png",
        "https://public.example/" + "a" * LONGEST,
    ],
)
@pytest.mark.parametrize("base_url", [LAN, "http://api.openai.com/v1", "https://llm.example/v1"])
def test_an_upstream_that_may_be_in_the_house_fetches_public_https_urls_alone(url: str, base_url: str) -> None:
    """What else it is shown is refused with what would be right, wherever the URL stands in the request."""
    refused = verdict(showing("https://public.example/a.png", url), base_url)

    assert isinstance(refused, BadRequest)
    assert (refused.status, refused.code, refused.param) == (400, "invalid_image_url", "messages")
    assert "https" in refused.message and "data URL" in refused.message


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,AA==", "DATA:image/png;base64,AA==", "https://public.example/a"]
)
def test_public_https_and_data_urls_pass(url: str) -> None:
    """One look-up for all images at a host, none for those that come along."""
    names = Names()

    assert verdict(showing(url, url + "?b"), LAN, names=names) == [LAN]
    assert names.asked == (["public.example"] if url.startswith("https") else [])


def test_a_maker_fetches_by_itself() -> None:
    """What its network may reach is its own business, and no name is looked up."""
    names = Names()

    assert verdict(showing("http://inner.example/a.png"), MAKER, names=names) == [MAKER]
    assert names.asked == []
    assert isinstance(verdict(showing("http://inner.example/a.png"), MAKER, self_hosted=True), BadRequest)


def test_a_spare_that_may_not_see_the_images_is_left_out() -> None:
    """The model that was chosen answers; the other way round the call is refused, not answered by a spare."""
    asked = showing("http://public.example/a.png")

    assert verdict(asked, MAKER, LAN) == [MAKER]
    assert isinstance(verdict(asked, LAN, MAKER), BadRequest)
    assert verdict(showing("https://public.example/a.png"), MAKER, LAN) == [MAKER, LAN]


def test_a_name_server_that_does_not_answer_is_no_fault_of_the_caller() -> None:
    """503, to try again when it says: nothing is known of the address."""
    refused = verdict(showing("https://slow.example/a.png"), LAN)

    assert isinstance(refused, Overloaded)
    assert (refused.status, refused.code, dict(refused.headers)) == (503, "overloaded", {"retry-after": "1"})


def test_a_team_whose_look_ups_hang_leaves_other_teams_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads are its share until the name server lets them go, whatever its calls have been answered meanwhile."""
    stuck, hung = threading.Event(), []

    def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
        if host.startswith("hang"):
            hung.append(host)
            stuck.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (PUBLIC, port))]

    async def scene() -> None:
        images, calls = ImageUrls(), range(AT_ONCE // MOST_HOSTS)
        hanging = [showing(*(f"https://hang-{n}-{call}.example/" for n in range(MOST_HOSTS))) for call in calls]
        answers = await asyncio.gather(*(images.check(one, 0, "a") for one in hanging), return_exceptions=True)
        held = len(hung)
        await images.check(showing("https://public.example/"), 0, "b")
        with pytest.raises(Overloaded):
            await images.check(showing("https://public.example:8443/"), 0, "a")
        stuck.set()
        async with asyncio.timeout(10):
            while await asyncio.gather(
                images.check(showing("https://later.example/"), 0, "a"), return_exceptions=True
            ) != [None]:
                pass

        assert all(isinstance(answer, Overloaded) for answer in answers)
        assert held == OF_A_TEAM

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("gateway.egress.destinations.LOOK_UP_WITHIN", 0.5)
    asyncio.run(scene())


def test_a_host_that_was_found_public_is_remembered_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its port, for so long, and among so many; what was refused is looked up anew."""
    monkeypatch.setattr("gateway.calls.image_urls.MOST_REMEMBERED", 1)
    names = Names()

    async def asked(*urls: str) -> int:
        before = len(names.asked)
        for url in urls:
            with suppress(BadRequest):
                await images.check(showing(url), 0, "team")
        return len(names.asked) - before

    async def scene() -> None:
        public, inner = "https://public.example/", "https://inner.example/"
        assert await asked(public, public) == 1
        assert await asked(inner, inner) == 2
        assert await asked(public, "https://public.example:8443/", public) == 2
        monkeypatch.setattr("gateway.calls.image_urls.REMEMBERED_FOR", 0.0)
        assert await asked("https://public.example:9443/", "https://public.example:9443/") == 2

    images = ImageUrls(Guard(resolve=names, rule="images may not go"))
    asyncio.run(scene())


def test_one_request_looks_up_few_names() -> None:
    """Look-ups have few places; nobody takes them all."""
    names = Names()
    refused = verdict(showing(*(f"https://{n}.example/" for n in range(MOST_HOSTS + 1))), LAN, names=names)

    assert isinstance(refused, BadRequest) and names.asked == []


def test_words_alone_cost_nothing() -> None:
    """No look-up for a request without images."""
    names = Names()

    assert verdict(showing(), LAN, names=names) == [LAN]
    assert names.asked == []
