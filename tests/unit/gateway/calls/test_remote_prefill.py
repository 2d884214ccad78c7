# Replicas that compute prompts for others: which are asked, once one has failed.

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from gateway.calls.remote_prefill import AWAY, RemotePrefills
from gateway.core.settings import Prefill, ProviderSettings
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.wire.base import Asking
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


async def test_of_a_prefiller_that_failed_one_call_finds_out() -> None:
    """Where it hangs, each of the others would wait for half of what its first token may take."""
    clock, prefiller = SetClock(), Prefiller()
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
    prefills = RemotePrefills(registry, cast(Any, prefiller), lambda *_: (1, 0), clock)
    request = ChatRequest(model="tiny", messages=(Message(role="user", content="Hi."),))
    asking = Asking(request=request, target=Target(model("tiny", "own"), own.endpoints[0]), api_key=None, streams=True)
    call = cast(Any, SimpleNamespace(size=1, beginning="b"))
    counts = list[int]()

    async def ask(calls: int, is_well: bool) -> None:
        asking_all = [asyncio.create_task(prefills.params_for(call, asking, 1000.0)) for _ in range(calls)]
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
