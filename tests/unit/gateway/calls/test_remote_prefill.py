# Replicas that compute prompts for others: which are asked, once one has failed.

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from gateway.calls.remote_prefill import AWAY, RemotePrefills
from gateway.core.settings import Prefill, ProviderSettings
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.wire.base import Asking, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError
from protocol.chat import ChatRequest, Message
from router.catalog.targets import Endpoint, Target
from tests.support.clock import SetClock
from tests.support.house import model


class Prefiller:
    """A replica that fails, hangs or answers, as its ``well`` says: not set, and it hangs."""

    def __init__(self) -> None:
        self.well: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.asked = 0

    async def send(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        if not await asyncio.shield(self.well):
            raise UpstreamError("It failed.", outcome="status_500")
        return SimpleNamespace(status=400, close=lambda: None)


class Holding:
    """A replica that computes prompts and holds the blocks of one model's alone."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def send(self, built: UpstreamRequest, *_: Any) -> Any:
        name = msgspec.json.decode(built.body)["model"]
        self.asked.append(name)
        held = b'{"lease": 1}' if name == "tiny" else b"null"
        told = b'{"kv_transfer_params": %s, "usage": {"gpu_seconds": 0.5}}' % held

        async def read(_: int) -> bytes:
            return told

        return SimpleNamespace(status=200, read=read, close=lambda: None)


CALL = cast(Any, SimpleNamespace(size=1, beginning="b"))


def prefills_at(prefiller: object, clock: SetClock, found: tuple[int, int] | None = (1, 0)) -> RemotePrefills:
    own, prompts = (
        ProviderSettings(
            name=name,
            format="openai",
            self_hosted=True,
            endpoints=(Endpoint("here", f"http://{name}/v1"),),
            prefill=Prefill(provider="prompts", tokens=0, share=0.0) if name == "own" else None,
        )
        for name in ("own", "prompts")
    )
    registry = ProviderRegistry({"own": own, "prompts": prompts})
    return RemotePrefills(registry, cast(Any, prefiller), lambda *_: found, clock)


def asking_of(name: str) -> Asking:
    request = ChatRequest(model=name, messages=(Message(role="user", content="Hi."),))
    target = Target(model(name, "own"), Endpoint("here", "http://own/v1"))
    return Asking(request=request, target=target, api_key=None, streams=True)


async def test_of_a_prefiller_that_failed_one_call_finds_out() -> None:
    """Where it hangs, each of the others would wait for half of what its first token may take."""
    clock, prefiller = SetClock(), Prefiller()
    prefills, asking, counts = prefills_at(prefiller, clock), asking_of("tiny"), list[int]()

    async def ask(calls: int, is_well: bool) -> None:
        asking_all = [asyncio.create_task(prefills.params_for(CALL, asking, 1000.0)) for _ in range(calls)]
        for _ in range(20):
            await asyncio.sleep(0)
        prefiller.well.set_result(is_well)
        await asyncio.gather(*asking_all)
        counts.append(prefiller.asked)
        prefiller.asked, prefiller.well = 0, asyncio.get_running_loop().create_future()
        clock.move(AWAY + 1)

    await ask(2, is_well=False)
    await ask(3, is_well=True)
    await ask(3, is_well=True)

    assert counts == [2, 1, 3]


async def test_a_prefiller_that_holds_nothing_of_a_model_is_left_alone_for_it() -> None:
    """It computed the prompt for nothing: of such a model, an adapter say, one call finds out whether it does now."""
    clock, prefiller = SetClock(), Holding()
    prefills = prefills_at(prefiller, clock)
    told = [await prefills.params_for(CALL, asking_of(name), 9.0) for name in ("tiny", "adapter", "adapter", "tiny")]
    clock.move(AWAY + 1)
    await prefills.params_for(CALL, asking_of("adapter"), 9.0)

    assert [params for params, _ in told] == [{"lease": 1}, None, None, {"lease": 1}]
    assert [took and (took.target, took.gpu_seconds) for _, took in told] == [
        ("prompts/here/http://prompts/v1/tiny", 0.5),
        ("prompts/here/http://prompts/v1/adapter", 0.5),
        None,
        ("prompts/here/http://prompts/v1/tiny", 0.5),
    ]
    assert prefiller.asked == ["tiny", "adapter", "tiny", "adapter"]


async def test_for_an_engine_that_takes_no_prompts_none_is_computed() -> None:
    """What it would not read is not asked for."""
    prefiller = Holding()

    assert await prefills_at(prefiller, SetClock(), None).params_for(CALL, asking_of("tiny"), 9.0) == (None, None)
    assert prefiller.asked == []
