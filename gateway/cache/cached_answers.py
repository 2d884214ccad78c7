# Answers from the cache, in the place of an upstream's, and answers that go there. A call that meets one is held,
# watched and booked as any other; it costs nothing, and its row says what it saved.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from billing.core.records import Status, UsageRecord, usage_of
from gateway.cache.kept_answers import (
    HEAVY,
    KeptAnswer,
    Place,
    calls_tools,
    is_repeatable,
    may_keep,
    place_of,
    ran_hosted_tools,
    seal,
    unseal,
    was_filtered,
)
from gateway.cache.store import CacheStore
from gateway.calls.answering import Answering
from gateway.calls.call import Call
from gateway.calls.hooks import ReplyHook
from gateway.core.background import Background
from gateway.core.settings import ProviderSettings, Settings
from gateway.moderation.moderator import Moderator
from gateway.storage.encryption import Sealer
from gateway.telemetry.meters import counter_of
from gateway.telemetry.metrics import Metrics
from protocol.chat import ChatReply
from protocol.completions import CompletionReply
from protocol.embeddings import EmbeddingReply, RerankReply
from protocol.events import Delta
from protocol.inference import MediaRequest, WholeReply
from protocol.media.audio import TranscriptionReply
from protocol.media.images import ImageReply
from protocol.serving.off_loop import in_parallel, off_loop
from router.catalog.targets import ModelSpec, Route, Target
from router.prompt_size.bounds import is_spoken

SHARED = "shared"  # the scope of teams that share


class Looked(Struct, frozen=True):
    """What the cache has for a call that goes by it."""

    place: Place  # of the answer of the model that the call would go to
    model: ModelSpec  # that one
    takes_all: bool  # sampled answers and tool calls too
    kept: KeptAnswer | None = None


class AnswerCache:
    """The cache as the calls of one edition meet it. Calls that do not go by it cost it a look at two names."""

    def __init__(
        self,
        settings: Settings,
        store: CacheStore,
        sealer: Sealer,
        background: Background,
        moderator: Moderator,
        metrics: Metrics,
    ) -> None:
        self._settings = settings.cache
        self._pepper = settings.key_pepper
        self._uses = settings.cache.models if settings.cache.max_bytes else {}
        self._store = store
        self._sealer = sealer
        self._background = background
        self._moderator = moderator
        self._metrics = metrics

    def takes(self, call: Call) -> bool:
        """Whether a call goes by the cache: its caller says so, its key, or the name that it asks for."""
        use = call.cache or self._uses.get(call.request.model)
        if use is None or use == "off" or call.is_internal or not self._settings.max_bytes:
            return False
        if is_spoken(call.request) or isinstance(call.request, MediaRequest):
            return False  # made anew each time
        return use == "all" or is_repeatable(call)

    async def look(self, call: Call, route: Route) -> Looked:
        """Return what there is for a call that the cache takes."""
        takes_all = (call.cache or self._uses.get(call.request.model)) == "all"
        model = route.targets[0].model
        place = await self._place_of(call, model, self._scope_of(call, route))
        looked, sealed = Looked(place, model, takes_all), await self._store.find(place)
        if sealed is None:
            self._count("away" if self._store.is_away else "miss")
            return looked
        kept = await in_parallel(len(sealed), HEAVY, partial(unseal, self._sealer, place, sealed))
        if kept is None or (calls_tools(kept) and not takes_all):
            self._count("miss")
            return looked
        self._count("hit")
        return replace(looked, kept=kept)

    def keeper(self, call: Call, looked: Looked, answering: Answering) -> ReplyHook:
        """Return what gathers an answer and keeps it, once it is whole and may go out."""
        return _Keeper(self, call, looked, answering)

    def keep(self, call: Call, looked: Looked, model: ModelSpec, answer: KeptAnswer) -> None:
        """Keep the answer of ``model`` to a call, behind it."""
        is_lost = was_filtered(answer) or ran_hosted_tools(answer) or not may_keep(answer)
        if is_lost or (calls_tools(answer) and not looked.takes_all):
            self._count("not_kept")
        else:
            self._background.spawn(self._keep(call, looked, model, answer))

    async def _keep(self, call: Call, looked: Looked, model: ModelSpec, answer: KeptAnswer) -> None:
        place = looked.place
        if model.name != looked.model.name or model.upstream_model != looked.model.upstream_model:
            place = await self._place_of(call, model, place.scope)
        sealed = await in_parallel(_size_of(answer), HEAVY, partial(seal, self._sealer, place, answer))
        limits, is_kept = self._settings, False
        if len(sealed) <= limits.max_answer_bytes:
            is_kept = await self._store.keep(place, sealed, ttl=limits.ttl, most=limits.max_bytes)
        self._count("kept" if is_kept else "not_kept")

    async def _place_of(self, call: Call, model: ModelSpec, scope: str) -> Place:
        policy = self._moderator.policy_for(call)  # what is taken out for one team is there for another
        redacts = () if policy is None else policy.redacted_groups("output")
        return await off_loop(call.size, partial(place_of, call, model, scope, self._pepper, redacts))

    def _scope_of(self, call: Call, route: Route) -> str:
        team = call.caller.team.id
        uses_own_keys = any(
            target.own is not None for target in route.targets
        )  # what these pay for is its team's alone
        return SHARED if team in self._settings.shared and not uses_own_keys else f"team:{team}"

    def _count(self, outcome: str) -> None:
        counter_of(self._metrics.cache, outcome).inc()


def answering_of(kept: KeptAnswer, target: Target, provider: ProviderSettings) -> Answering:
    """Return a kept answer in the place of an upstream's: all of its events are there."""
    said = Answering(target, provider, kept.events(), whole=kept.whole, usage=kept.usage, dropped=kept.dropped)
    return replace(said, is_kept=True)


class _Keeper(ReplyHook):
    """Gathers one answer as its client gets it."""

    def __init__(self, cache: AnswerCache, call: Call, looked: Looked, answering: Answering) -> None:
        self._cache, self._call, self._looked = cache, call, looked
        self._model, self._dropped = answering.target.model, answering.dropped
        self._pieces: list[str | Delta] = []
        self._left = cache._settings.max_answer_bytes  # characters of a stream that are still worth gathering
        self._whole: WholeReply | None = None

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Gather, and change nothing."""
        if self._left >= 0:
            piece = replace(delta, gpu_seconds=0.0, token_ids=())
            self._pieces.append(piece.text if piece == Delta(text=piece.text) else piece)
            self._left -= len(piece.text) + len(piece.reasoning) + sum(len(each.arguments) for each in piece.tool_calls)
        return (delta,)

    async def whole(self, whole: WholeReply) -> WholeReply:
        """Gather an answer that came whole."""
        self._whole = whole
        return whole

    def close(self, record: UsageRecord) -> None:
        """Keep it if it ended well, and with the output limit that its caller asked for."""
        if record.status is not Status.ANSWERED or self._call.fitted_output is not None or self._left < 0:
            return
        answer = KeptAnswer(usage=usage_of(record), dropped=self._dropped, pieces=tuple(self._pieces))
        match self._whole:
            case ChatReply() as chat:
                answer = replace(answer, chat=chat)
            case CompletionReply() as completion:
                answer = replace(answer, completion=completion)
            case None:
                pass
            case EmbeddingReply() as embedding:
                answer = replace(answer, embedding=embedding)
            case RerankReply() as rerank:
                answer = replace(answer, rerank=rerank)
            case ImageReply() | TranscriptionReply():
                return  # made anew each time
        self._cache.keep(self._call, self._looked, self._model, answer)


def _size_of(answer: KeptAnswer) -> int:
    return HEAVY if answer.whole is not None else sum(len(each) for each in answer.pieces if isinstance(each, str))
