# Scripts of web pages: which may call, and what they may read.

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import httpx
import pytest
from msgspec.structs import replace

from tests.support.house import House, serving

APP, OTHER = "https://app.example.com", "https://other.example.com"
ASKED = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os,x-tier",
}


@pytest.fixture(scope="module")
def open_house(house: House) -> Iterator[House]:
    """A gateway that one page may call."""
    settings = replace(house.settings, cors_origins=(APP,), data_dir=house.settings.data_dir / "cors")
    with serving(settings) as url:
        yield dataclasses.replace(house, url=url)


def test_a_page_may_ask_before_it_calls(open_house: House) -> None:
    """Browsers ask without the key; the answer names every header that the call will have."""
    answer = httpx.options(f"{open_house.url}/v1/chat/completions", headers={"origin": APP, **PREFLIGHT})
    allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}

    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == APP
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert set(PREFLIGHT["access-control-request-headers"].split(",")) <= allowed
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"model": "nobody"}], ids=["plain", "streamed", "refused"])
def test_a_page_may_read_the_answer(open_house: House, more: dict[str, object]) -> None:
    """An error, too, with what clients look at: the request's id and the rate limits. None is for cookies."""
    with open_house.client() as client:
        answer = client.post("/v1/chat/completions", json=ASKED | more, headers={"origin": APP, "cookie": "a=b"})
    shown = answer.headers["access-control-expose-headers"].split(", ")

    assert answer.headers["access-control-allow-origin"] == APP
    assert {"x-request-id", "x-ratelimit-remaining-tokens", "retry-after"} <= set(shown)
    assert "access-control-allow-credentials" not in answer.headers
    assert answer.headers["x-request-id"]


def test_a_page_that_is_not_listed_may_not(open_house: House) -> None:
    """Its browser asks in vain, and shows it no answer. A listed name in a longer one is another."""
    for origin in (OTHER, f"{APP}.evil.example", "null"):
        asked = httpx.options(f"{open_house.url}/v1/models", headers={"origin": origin, **PREFLIGHT})
        got = httpx.get(f"{open_house.url}/v1/models", headers={"origin": origin})

        assert asked.status_code == 400
        assert "access-control-allow-origin" not in got.headers


def test_without_the_setting_no_page_may(house: House) -> None:
    """A preflight is a method like another, and no answer speaks of origins."""
    asked = httpx.options(f"{house.url}/v1/chat/completions", headers={"origin": APP, **PREFLIGHT})
    with house.client() as client:
        got = client.get("/v1/models", headers={"origin": APP})

    assert not [name for name in (*asked.headers, *got.headers) if name.startswith("access-control")]
