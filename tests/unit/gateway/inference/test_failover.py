# A reply of our own engine that breaks: who is asked to go on with it, from where, and who never is.

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.calls import resume_state
from gateway.calls.call import Call
from gateway.calls.remote_prefill import RemotePrefills
from gateway.core.background import Background
from gateway.core.principals import Caller, Team
from gateway.core.settings import ProviderSettings, QueueSettings, Retries
from gateway.inference.attempt import AttemptLog
from gateway.inference.dispatcher import Dispatcher
from gateway.inference.failover import MOST_REPLICAS, FailoverStream
from gateway.inference.limiter import TargetLimiter
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.first_tokens import FirstTokens
from gateway.upstreams.resilience.retry_budget import RetryBudgets
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure, UpstreamRefused, UpstreamTimeout
from protocol.chat import ChatRequest, Message
from protocol.completions import CompletionRequest
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.inference import Request
from router import RoutingOptions
from router.catalog.targets import Endpoint, Route, Target
from tests.support.clock import SetClock
from tests.support.house import NEVER_OPENS, model

HI = ChatRequest(model="llama", messages=(Message(role="user", content="hi"),), stream=True)
ASK = CompletionRequest(model="llama", prompt="hi")
BROKEN = UpstreamError("broken", outcome="reset")
HANGS = UpstreamError("never comes")
Piece = bytes | UpstreamFailure | Callable[[], None]


def said(text: str, *tokens: int, **more: Any) -> bytes:
    """Return an event in which our engine says something."""
    choice = {"index": 0, "delta": {"content": text}, "token_ids": tokens, "finish_reason": None, **more}
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


END = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"gpu_seconds":0.5}}\n\ndata: [DONE]\n\n'
)


@dataclass
class Replica:
    """What one replica does when it is asked: fail, or say some pieces."""

    pieces: list[Piece]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # that it was asked with
    waits: list[float] = field(default_factory=list)  # seconds for which its next piece was awaited at the most
    is_closed: bool = False

    async def next_piece(self, patience: float = 0.0) -> bytes | None:
        """Return the next piece, or raise what comes in its place."""
        self.waits.append(patience)
        if not self.pieces:
            return None
        piece = self.pieces.pop(0)
        if piece is HANGS:
            await asyncio.Event().wait()
        if isinstance(piece, UpstreamFailure):
            raise piece
        if isinstance(piece, bytes):
            return piece
        piece()
        return await self.next_piece()

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


class Scene:
    """A reply of our own engine, which has so many replicas, and a spare model of somebody else's."""

    def __init__(self, *replicas: Replica, request: Request = HI) -> None:
        self.clock = SetClock()
        self.replicas = {f"r{place}": replica for place, replica in enumerate(replicas)} | {"spare": Replica([END])}
        own, spare = (
            ProviderSettings(
                name=name,
                format="openai",
                self_hosted=name == "own",
                endpoints=tuple(Endpoint(host, f"http://{host}/v1") for host in hosts),
                retries=Retries(attempts=1, budget=0.0),
                breaker=NEVER_OPENS,
            )
            for name, hosts in (("own", list(self.replicas)[:-1]), ("else", ["spare"]))
        )
        registry = ProviderRegistry({"own": own, "else": spare})
        llama, other = model("llama", "own"), model("other", "else")
        targets = (*(Target(llama, one) for one in own.endpoints), Target(other, spare.endpoints[0]))
        self.route = Route("llama", targets, "named")
        self.breakers = Breakers(registry, targets, self.clock, Background(), Redis(port=1))
        self.breakers.is_alone = True
        self.budgets = RetryBudgets()
        metrics = Metrics()
        limiter = TargetLimiter(registry, targets, self.breakers, QueueSettings(), self.clock, metrics)
        self.registry, self.metrics = registry, metrics
        client, first_tokens = cast(UpstreamClient, self), FirstTokens(self.clock)
        prefills = RemotePrefills(registry, client, limiter.prompt_at, self.clock)
        self.dispatcher = Dispatcher(
            registry, client, self.breakers, self.budgets, limiter, prefills, first_tokens, self.clock
        )
        self.call = Call(
            request_id=self.clock.new_id(),
            caller=Caller(team=Team(id="a", name="A"), key_id="k"),
            endpoint="chat.completions",
            request=request,
            routing=RoutingOptions(),
            created_at=self.clock.now(),
            started=self.clock.monotonic(),
        )
        self.log = AttemptLog()

    async def send(self, request: UpstreamRequest, connect: float, patience: float) -> Replica:
        """Ask a replica, as the upstream client does."""
        replica = self.replicas[request.url.split("/")[2]]
        replica.bodies.append(msgspec.json.decode(request.body))
        failure = replica.pieces[0]
        if isinstance(failure, UpstreamFailure) and failure is not HANGS:
            raise failure
        return replica

    async def begin(self) -> FailoverStream:
        """Ask along the route, and return the reply's events."""
        context = self.dispatcher.begin(self.call, self.route, self.log)
        answering = await self.dispatcher.try_targets(context)
        return FailoverStream(self.dispatcher, context, answering, self.clock, self.metrics)

    async def read(self) -> list[Event]:
        """Return every event of the reply. Raises UpstreamFailure as its reader would see it."""
        self.source = await self.begin()
        events = [*self.source.first]
        while not (events and isinstance(events[-1], ReplyEnd)):
            events += await self.source.next_events(has_grown=True)
        return events

    @property
    def asked(self) -> dict[str, list[tuple[list[int], int]]]:
        """From which tokens, and behind how many characters, each replica was asked to speak."""
        return {
            host: [(body.get("resume_token_ids", []), body.get("resume_text_chars", 0)) for body in replica.bodies]
            for host, replica in self.replicas.items()
            if replica.bodies
        }

    @property
    def outcomes(self) -> list[str]:
        """How each attempt ended."""
        return [attempt.outcome for attempt in self.log.attempts]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


async def test_the_next_replica_goes_on_from_what_came() -> None:
    """The same seed, the tokens so far, the characters so far; the two are one reply, of the device time of both."""
    first = Replica([said("", 1) + said("ab", 2, gpu_seconds=0.25), BROKEN])
    second = Replica([said(""), said("c"), said("d", 3, 4, gpu_seconds=0.5), END])
    scene = Scene(first, second)
    events = await scene.read()

    assert text_of(events) == "abcd"
    assert scene.asked == {"r0": [([], 0)], "r1": [([1, 2], 2)]}
    assert first.bodies[0]["seed"] == second.bodies[0]["seed"]
    assert [event.gpu_seconds for event in events if isinstance(event, Delta) and event.token_ids] == [0, 0.25, 0.75]
    assert [event.usage.gpu_seconds for event in events if isinstance(event, UsageReport)] == [0.75]
    assert scene.source.tokens_made == 4
    assert first.is_closed and scene.outcomes == ["reset", "ok"]


async def test_a_reply_is_given_to_so_many_replicas_and_no_more() -> None:
    """Each once. It may itself be what ends them."""
    scene = Scene(*(Replica([said("a", 1), BROKEN]) for _ in range(MOST_REPLICAS + 1)))
    with pytest.raises(UpstreamError, match="broken"):
        await scene.read()

    assert scene.asked == {"r0": [([], 0)], "r1": [([1], 1)], "r2": [([1, 1], 2)]}
    assert scene.outcomes == ["reset"] * MOST_REPLICAS


async def test_another_model_never_goes_on() -> None:
    """The route has a spare; what it would say is not what was begun."""
    scene = Scene(Replica([said("a", 1), BROKEN]))
    with pytest.raises(UpstreamError, match="broken"):
        await scene.read()

    assert list(scene.asked) == ["r0"]


@pytest.mark.parametrize("failure", [UpstreamRefused("no such field"), UpstreamTimeout("silence"), BROKEN])
async def test_who_cannot_go_on_is_not_what_the_client_hears_of(failure: UpstreamFailure) -> None:
    """It hears how its reply broke; a refusal ends the search, a fault does not."""
    scene = Scene(Replica([said("a", 1), UpstreamError("torn")]), Replica([failure]), Replica([failure]))
    with pytest.raises(UpstreamError, match="torn"):
        await scene.read()

    assert list(scene.asked) == ["r0", "r1", "r2"][: 2 if isinstance(failure, UpstreamRefused) else 3]


async def test_a_replica_that_is_away_is_passed_by() -> None:
    """Its breaker is open; the next one goes on."""
    scene = Scene(Replica([said("a", 1), BROKEN]), Replica([said("b", 2), END]), Replica([said("c", 2), END]))
    await scene.breakers.force_open(scene.breakers.watch(scene.route.targets[1]), "by hand")

    assert text_of(await scene.read()) == "ac"
    assert list(scene.asked) == ["r0", "r2"]


@pytest.mark.parametrize("limit", ["budget", "time"])
async def test_without_budget_or_time_no_replica_is_asked(limit: str) -> None:
    """A continuation is an extra attempt of its call, and ends with it."""
    scene = Scene(Replica([said("a", 1), BROKEN]), Replica([said("b", 2), END]))
    budget = scene.budgets.of(scene.registry.settings("own"))

    def spend() -> None:
        if limit == "time":
            scene.clock.move(600.0)
        while limit == "budget" and budget.take_move(scene.clock.monotonic()):
            pass

    scene.replicas["r0"].pieces.insert(1, spend)
    with pytest.raises(UpstreamError, match="broken"):
        await scene.read()

    assert list(scene.asked) == ["r0"]


async def test_a_client_that_leaves_in_the_pause_leaves_no_upstream_speaking() -> None:
    """The replica that was to go on is closed, and its attempt abandoned."""
    second = Replica([HANGS])
    scene = Scene(Replica([said("a", 1), BROKEN]), second)
    reading = asyncio.create_task(scene.read())
    while not second.bodies:
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading

    assert second.is_closed and scene.outcomes == ["reset", "abandoned"]


def calling(index: int, arguments: str, call_id: str | None = None) -> dict[str, Any]:
    """Return a delta with a piece of a tool call; the first piece has an id."""
    function = {"arguments": arguments} | ({"name": "pay"} if call_id else {})
    return {"index": index, "function": function} | ({"id": call_id} if call_id else {})


async def test_a_call_that_broke_off_is_told_to_its_end() -> None:
    """A replica that goes on tells its calls from their beginning: the client gets what it lacks, under one id."""
    first = Replica([said("", 1, delta={"content": "ok", "tool_calls": [calling(0, '{"to', "a")]}), BROKEN])
    again = [calling(0, '{"toll', "x"), calling(0, '": 3'), calling(0, "}"), calling(1, "{}", "b")]
    second = Replica([*(said("", delta={"tool_calls": [piece]}) for piece in again), END])
    events = await Scene(first, second, request=HI).read()
    calls = [call for event in events if isinstance(event, Delta) for call in event.tool_calls]

    assert [(call.index, call.id, call.arguments) for call in calls] == [
        (0, "a", '{"to'),
        (0, None, "ll"),
        (0, None, '": 3'),
        (0, None, "}"),
        (1, "b", "{}"),
    ]


@pytest.mark.parametrize(
    ("begun", "request_"),
    [
        (said("a"), HI),
        (said("a", -1), HI),
        (said("a", 2**40), HI),
        (said("a", 1, logprobs={"content": "none"}), replace(HI, logprobs=True)),
        (said("", 1, delta={"content": "a", "reasoning_content": "b"}), HI),
        (said("a", 1), replace(HI, n=2)),
        (said("a", 1), replace(ASK, prompt=["hi", "ho"])),
        (said("a", 1), replace(ASK, prompt=[5, 6], echo=True)),
    ],
)
async def test_what_cannot_be_gone_on_with_breaks_off(begun: bytes, request_: Request) -> None:
    """No ids of tokens, no scores that were asked for, words beside the text, several replies, an unknown echo."""
    scene = Scene(Replica([begun, BROKEN]), Replica([said("b", 2), END]), request=request_)
    with pytest.raises(UpstreamError, match="broken"):
        await scene.read()

    assert list(scene.asked) == ["r0"]


async def test_what_is_the_requests_own_fault_is_asked_of_no_other() -> None:
    """A replica that refuses to go on says what every other would; the client hears it in its words."""
    frame = b'data: {"error": {"message": "Too slow a grammar.", "type": "invalid_request_error"}}\n\n'
    scene = Scene(Replica([said("a", 1), frame]), Replica([said("b", 2), END]))
    with pytest.raises(UpstreamRefused, match="Too slow a grammar"):
        await scene.read()

    assert list(scene.asked) == ["r0"] and scene.outcomes == ["refused"]


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
async def test_an_echo_is_no_part_of_the_reply(prompt: str | list[str | int | list[int]]) -> None:
    """Its characters are not counted, and it is not asked for again."""
    first, second = Replica([said("hia", 1), BROKEN]), Replica([said("b", 2), END])
    scene = Scene(first, second, request=replace(ASK, prompt=prompt, echo=True))
    await scene.read()

    assert scene.asked == {"r0": [([], 0)], "r1": [([1], 1)]}
    assert first.bodies[0]["echo"] is True and "echo" not in second.bodies[0]


async def test_a_reply_without_its_count_asks_for_it() -> None:
    """Its end was told and its usage was not: another replica counts, and tells the end only once."""
    told = said("a", 1) + END[: END.index(b"\n\n") + 2]
    scene = Scene(Replica([told]), Replica([said(""), END]))
    events = await scene.read()

    assert [event.finish_reason for event in events if isinstance(event, Delta) and event.finish_reason] == ["stop"]
    assert [event.usage.input_tokens for event in events if isinstance(event, UsageReport)] == [9]
    assert scene.asked["r1"] == [([1], 1)] and scene.outcomes == ["cut", "ok"]


async def test_upstreams_that_are_not_ours_are_not_asked_to_go_on() -> None:
    """There is nothing to go on from."""
    scene = Scene(Replica([BROKEN]))
    scene.replicas["spare"].pieces[:] = [said("a", 1), BROKEN]
    with pytest.raises(UpstreamError, match="broken"):
        await scene.read()

    assert scene.outcomes == ["reset", "reset"]


@pytest.mark.parametrize(("place", "waits"), [(0, [30.0, 30.0, 30.0]), (1, [30.0, 10.0, -10.0])], ids=["own", "else"])
async def test_a_replica_that_says_that_it_lives_is_waited_for(place: int, waits: list[float]) -> None:
    """Its replies may have to wait: any word of it will do. From others a comment is no token."""
    lives = b": alive\n\n"
    scene = Scene(Replica([said("He"), lives, lives, END]))
    scene.replicas["spare"].pieces = [said("He"), lives, lives, END]
    scene.route = replace(scene.route, targets=scene.route.targets[place:])
    source = await scene.begin()
    replica = list(scene.replicas.values())[place]
    replica.waits.clear()
    for _ in range(3):
        await source.next_events(has_grown=False)
        scene.clock.move(20.0)

    assert replica.waits == waits


async def test_a_token_whose_score_did_not_come_is_made_again() -> None:
    """Twice, at two replicas: each goes on behind the last token that its reader has a log-probability of."""

    def scores(*tokens: int) -> dict[str, Any]:
        return {"logprobs": {"content": [{"token": str(token), "logprob": -token} for token in tokens]}}

    scene = Scene(
        Replica([said("a", 1, 2, 3, **scores(1)), BROKEN]),
        Replica([said("b", 2, 3, **scores(2)), BROKEN]),
        Replica([said("c", 3, **scores(3)), END]),
        request=replace(HI, logprobs=True),
    )
    events = await scene.read()

    assert text_of(events) == "abc" and scene.source.tokens_made == 3
    assert scene.asked == {"r0": [([], 0)], "r1": [([1], 1)], "r2": [([1, 2], 2)]}


async def test_a_reply_that_has_ended_is_whole_without_its_count() -> None:
    """Nobody is there to count it: what came is all there is."""
    scene = Scene(Replica([said("a", 1, finish_reason="stop"), BROKEN]))
    events = await scene.read()

    assert text_of(events) == "a" and isinstance(events[-1], ReplyEnd)
    assert scene.outcomes == ["reset"]


async def test_a_break_counts_against_who_broke() -> None:
    """One request each: failed for the replica that died, answered for the one that went on."""
    scene = Scene(Replica([said("a", 1), BROKEN]), Replica([said("b", 2), END]))
    await scene.read()
    tallies = [watched.breaker.tallies(scene.clock.monotonic())[-1] for watched in scene.breakers.all()]

    assert [(tally.requests, tally.failures) for tally in tallies] == [(1, 1), (1, 0), (0, 0)]


async def test_no_more_tokens_are_kept_than_a_reply_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that outgrows every bound breaks off when its replica dies."""
    monkeypatch.setattr(resume_state, "MOST_TOKENS", 3)
    scene = Scene(Replica([said("a", 1, 2, 3, 4), BROKEN]), Replica([said("b", 5), END]))
    with pytest.raises(UpstreamError, match="broken"):
        await scene.read()

    assert list(scene.asked) == ["r0"]
