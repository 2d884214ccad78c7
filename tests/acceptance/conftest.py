# One house for all acceptance tests of a process: starting one takes a second, a test a few milliseconds.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from openai import OpenAI

from billing.core.money import to_nano
from billing.core.pictures import PicturePrice
from billing.core.prices import Price
from gateway.core.settings import HostedTools
from router.catalog.targets import Capability, Endpoint
from tests.support.house import (
    House,
    anthropic_provider,
    azure_provider,
    bedrock_provider,
    entra_client,
    gemini_provider,
    mcp_servers,
    model,
    running_house,
    settings_for,
)
from tests.support.scripted_mcp import ScriptedMcp
from tests.support.scripted_realtime import ScriptedRealtime
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey

CONVERSED = "us.anthropic.claude-opus-4-6-v1"
VOICE_PRICE = Price(
    input=to_nano(4),
    cached_input=to_nano("0.4"),
    output=to_nano(16),
    audio_input=to_nano(32),
    cached_audio=to_nano("0.4"),
    audio_output=to_nano(64),
)


@pytest.fixture(scope="session")
def upstream() -> Iterator[ScriptedUpstream]:
    """The outside world."""
    models = ("small", "large", "claude", "gpt", "gpt-entra", "gemini-3-flash", "gpt-5")
    others = (
        "cohere-rerank",
        "gpt-image-2",
        "grok-image",
        "tts-1",
        "gpt-4o-mini-tts",
        "whisper-1",
        "gpt-4o-transcribe",
        CONVERSED,
    )
    with ScriptedUpstream(models=(*models, *others)) as upstream:
        yield upstream


@pytest.fixture(scope="session")
def mcp() -> Iterator[ScriptedMcp]:
    """A server of tools in the outside world."""
    with ScriptedMcp() as server:
        yield server


@pytest.fixture(scope="session")
def voices() -> Iterator[ScriptedRealtime]:
    """A provider of conversations by voice."""
    with ScriptedRealtime() as server:
        yield server


@pytest.fixture(scope="session")
def house(
    upstream: ScriptedUpstream,
    mcp: ScriptedMcp,
    voices: ScriptedRealtime,
    tmp_path_factory: pytest.TempPathFactory,
    postgres_url: str,
) -> Iterator[House]:
    """A gateway in front of it, with a team."""
    data_dir: Path = tmp_path_factory.mktemp("house")
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, upstream.url, data_dir)
        providers = settings.providers | {
            "anthropic": replace(
                anthropic_provider(upstream.root_url), hosted_tools=HostedTools(code_interpreter=True)
            ),
            "azure": azure_provider(upstream.root_url),
            "bedrock": bedrock_provider(upstream.root_url),
            "gemini": gemini_provider(upstream.root_url),
            "entra": azure_provider(
                upstream.root_url, name="entra", api_keys=(), oauth=entra_client(upstream.root_url)
            ),
        }
        own = settings.providers["upstream"]
        hosted = HostedTools(
            file_search={"*": ("vs_all",), "others": ("vs_theirs",)},
            code_interpreter=True,
            image_generation="gpt-image-2",
            mcp=("MCP.example.com", "connector_mail"),
        )
        providers["native"] = replace(own, name="native", responses=True, hosted_tools=hosted)
        claude = model("claude", "anthropic", parallel_n=True)
        ran = {"web_search": to_nano("0.01"), "code_interpreter": to_nano("0.03")}
        claude = replace(claude, price=replace(claude.price, cache_write_1h=to_nano(2), **ran))
        models = settings.models | {"claude": claude}
        models |= {"gpt": model("gpt", "azure"), "gpt-entra": model("gpt-entra", "entra")}
        searching = replace(claude.price, cache_write_1h=None, code_interpreter=None)
        for name in ("native-before", "native-unpriced"):
            models[name] = model(name, "native", upstream_model="gpt-5")
        models["conversed"] = model("conversed", "bedrock", upstream_model=CONVERSED)
        models["gemini"] = model("gemini", "gemini", upstream_model="gemini-3-flash")
        unit = Price(input=to_nano(0), output=to_nano(0), search_unit=to_nano("0.002"))
        ranks = frozenset({Capability.RERANK})
        pictures = frozenset({Capability.IMAGES})
        tokens, each = (
            Price(input=to_nano(5), output=to_nano(30), image_input=to_nano(8)),
            replace(unit, search_unit=None, image=to_nano("0.07")),
        )
        models["painter"] = model("painter", upstream_model="gpt-image-2", price=tokens, capabilities=pictures)
        models["brush"] = model("brush", upstream_model="grok-image", price=each, capabilities=pictures)
        by_kind = tuple(
            PicturePrice(quality=quality, size=size, price=to_nano(price))
            for quality, size, price in (
                *(("low", "1024x1024", "0.01"), ("low", "1536x1024", "0.02"), ("high", None, "0.17")),
                *(("auto", "1024x1024", "0.03"), ("auto", "1536x1024", "0.05")),
            )
        )
        kinds = replace(each, image=to_nano("0.17"), pictures=by_kind)
        more = {"file_search": to_nano("0.0025"), "code_interpreter": to_nano("0.03"), "image": kinds.image}
        own_tools = replace(searching, **more, pictures=by_kind)
        models["native"] = model("native", "native", upstream_model="gpt-5", price=own_tools)
        models["sketch"] = model("sketch", upstream_model="gpt-image-2", price=kinds, capabilities=pictures)
        models["canvas"] = model("canvas", upstream_model="grok-image", price=kinds, capabilities=pictures)
        speaks = frozenset({Capability.SPEECH})
        said = replace(unit, search_unit=None, character=to_nano("0.000015"))
        models["voice"] = model("voice", upstream_model="tts-1", price=said, capabilities=speaks)
        spoken = Price(input=to_nano("0.6"), output=to_nano(12))
        models["actor"] = model("actor", upstream_model="gpt-4o-mini-tts", price=spoken, capabilities=speaks)
        writes = frozenset({Capability.TRANSCRIPTION})
        heard = replace(unit, search_unit=None, audio_second=to_nano("0.0001"))
        models["scribe"] = model("scribe", upstream_model="whisper-1", price=heard, capabilities=writes)
        written = Price(input=to_nano(6), output=to_nano(10))
        models["clerk"] = model("clerk", upstream_model="gpt-4o-transcribe", price=written, capabilities=writes)
        providers["voices"] = replace(own, name="voices", endpoints=(Endpoint("local", voices.url),))
        classic = azure_provider(voices.url.removesuffix("/v1"), name="classic", api_keys=("sk-upstream",))
        providers["classic"] = classic
        talks = {"capabilities": frozenset({Capability.REALTIME}), "context": 4096, "price": VOICE_PRICE}
        models["talker"] = model("talker", "voices", upstream_model="gpt-realtime", **talks)
        models["classic-talker"] = model("classic-talker", "classic", upstream_model="my realtime", **talks)
        models["speaker"] = model("speaker", upstream_model="small", price=VOICE_PRICE)
        models["silent"] = model("silent", upstream_model="small", capabilities=frozenset({Capability.CHAT}))
        models["ranker"] = model("ranker", upstream_model="cohere-rerank", price=unit, capabilities=ranks)
        servers = {each.name: each for each in mcp_servers(mcp.url)}
        with running_house(replace(settings, providers=providers, models=models, mcp_servers=servers)) as house:
            yield house


@pytest.fixture
def openai(house: House) -> Iterator[OpenAI]:
    """The stock client of the team; it does not retry, so that a test sees every answer."""
    with OpenAI(base_url=house.url + "/v1", api_key=house.team_key, max_retries=0) as client:
        yield client


@pytest.fixture
def strict_upstream(upstream: ScriptedUpstream) -> Iterator[None]:
    """No call of the test breaks a rule of an upstream's API; what was asked before is forgotten."""
    upstream.forget()
    yield
    assert upstream.violations == []
    upstream.forget()


@pytest.fixture
def client(house: House) -> Iterator[httpx.Client]:
    """A client of the team."""
    with house.client() as client:
        yield client
