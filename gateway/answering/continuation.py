# Where the events of a reply come from: one upstream; or, when a replica of our own engine dies in mid-stream, another
# that goes on from the tokens already made. The client sees a pause, and the text that the first would have written.

from __future__ import annotations

from array import array

import msgspec
import structlog
from msgspec import Raw, Struct
from msgspec.structs import replace

from gateway.answering.attempts import Answering, AttemptLog, Trip, walk
from gateway.answering.call import Call
from gateway.errors import UpstreamError, UpstreamFailure, UpstreamTimeout
from gateway.providers.base import Request, Resume, replies_asked
from gateway.resilience.deadline import Deadline
from gateway.services import Services
from gateway.telemetry.metrics import counter_of
from protocol.completions import CompletionRequest
from protocol.errors import ServiceError
from protocol.events import Delta, Event, ReplyEnd, ToolCallDelta, UsageReport
from router.bounds import prompt_characters
from router.targets import Route

MOST_REPLICAS = 3  # that one reply is given to, each once: one that has ended them all may itself be what ends them
MOST_TOKENS = 2**17  # of one reply, kept to go on from

log = structlog.get_logger()


class Source:
    """The events of one reply, whoever makes them. ``answering`` is the upstream that speaks now.

    Take the events in ``first``, then those of ``next_events``.
    """

    def __init__(self, services: Services, call: Call, route: Route, answering: Answering, tried: AttemptLog) -> None:
        self.answering = answering
        self._services = services
        self._call = call
        self._route = route
        self._tried = tried
        self._grew = services.clock.monotonic()  # since when its next token is awaited
        self._replicas = {answering.target.key}  # that this reply was given to
        self._progress = Progress(call.request) if answering.provider.self_hosted and answering.events else None
        self.first = self._follow(answering.first)

    @property
    def tokens_made(self) -> int:
        """How many tokens the reply has, where its upstream names them; else 0."""
        return self._progress.tokens_made if self._progress is not None else 0

    async def next_events(self, *, has_grown: bool) -> list[Event]:
        """Return what came next, and together; ``has_grown`` tells whether a token has come since the last time.

        Raises UpstreamFailure when the reply breaks and nobody goes on with it.
        """
        try:
            return self._follow(await self._read(has_grown))
        except UpstreamFailure as failure:
            self._note(failure)
            return self._follow(await self._go_on(failure))

    async def close(self) -> None:
        """Close the upstream that speaks now."""
        await self.answering.close()

    def _follow(self, events: list[Event]) -> list[Event]:
        return events if self._progress is None else self._progress.follow(events)

    async def _read(self, has_grown: bool) -> list[Event]:
        answering, now = self.answering, self._services.clock.monotonic()
        assert answering.response is not None and answering.events is not None
        if answering.events.failure is not None:
            raise answering.events.failure
        if has_grown:  # its next token is awaited from now on: what a slow client took is not the upstream's
            self._grew = now
        timeouts = answering.provider.timeouts
        silent, late = self._grew + timeouts.between_tokens, self._call.started + timeouts.total
        try:
            piece = await answering.response.next_piece(min(silent, late) - now)
        except UpstreamTimeout as exc:
            if late <= silent:
                exc.outcome = "deadline"
            raise
        if piece is not None:
            return answering.events.feed(piece)
        if self._progress is not None and not self._progress.is_counted:
            raise UpstreamError("The upstream's answer was cut off.", outcome="cut")
        return answering.events.finish()

    def _note(self, failure: UpstreamFailure) -> None:
        """Put down whose answer it was that broke."""
        self._tried.broke(failure.outcome)
        if (permit := self.answering.permit) is not None:
            team, size = self._call.caller.team.id, prompt_characters(self._call.request)
            self._services.breakers.broke(permit, self.answering.began, failure, team, size)

    async def _go_on(self, failure: UpstreamFailure) -> list[Event]:
        """Return the first events of another replica that goes on. Raises ``failure`` where there is none."""
        progress, broken = self._progress, self.answering
        if progress is None:
            raise failure
        await broken.close()
        resume = progress.resume()
        if resume is not None and len(self._replicas) < MOST_REPLICAS:
            try:
                self.answering = await self._find_another(resume, failure)
            except ServiceError as exc:
                log.info("nobody_continues", request_id=self._call.request_id, error=exc.message)
            else:
                self._replicas.add(self.answering.target.key)
                progress.begin_again(resume)
                self._tell("continued", broken, failure)
                return self.answering.first
        if progress.is_finished:
            return [ReplyEnd()]  # every word is here, only the count or the end mark is not
        self._tell("broken", broken, failure)
        raise failure

    async def _find_another(self, resume: Resume, failure: UpstreamFailure) -> Answering:
        """Return another endpoint of the same model that goes on from ``resume``. Raises ServiceError."""
        services, call, broken = self._services, self._call, self.answering
        model = broken.target.model.name
        others = [one for one in self._route.targets if one.model.name == model and one.key not in self._replicas]
        trip = Trip(
            Deadline(call.started + broken.provider.timeouts.total), services.budgets.of(broken.provider), resume
        )
        if isinstance(call.request, CompletionRequest):
            call = replace(call, request=replace(call.request, echo=None))  # the echo is out
        route = replace(self._route, targets=tuple(others))
        return await walk(services, call, route, trip, self._tried, failure=failure)

    def _tell(self, outcome: str, broken: Answering, failure: UpstreamFailure) -> None:
        counter_of(self._services.metrics.continuations, broken.target.model.name, outcome).inc()
        log.warning(
            f"reply_{outcome}",
            request_id=self._call.request_id,
            broken=broken.target.key,
            failure=failure.outcome,
            tokens=self.tokens_made,
        )


class Progress:
    """What has come of a reply of our own engine, as far as another replica must know it to go on."""

    def __init__(self, request: Request) -> None:
        self.tokens_made = 0
        self.is_counted = False  # its usage has come
        self._tokens = array("I")
        self._unfinished = replies_asked(request)  # replies that have not said why they ended
        self._fits = self._unfinished == 1  # the engine goes on with one reply at a time
        self._text_chars = 0  # of the reply's text, as its reader has it
        self._calls: dict[int, int] = {}  # characters of each tool call's arguments, as its reader has them
        self._retold: dict[int, int] = {}  # how many of them the replica that speaks now has still to tell again
        logprobs = getattr(request, "logprobs", None)
        self._is_scored = logprobs is not None and logprobs is not False
        self._scores = 0  # tokens whose log-probabilities its reader has: the first ones
        self._is_first = True  # nobody else has had the reply
        self._gpu_seconds = 0.0  # of the replica that speaks now
        self._gpu_seconds_before = 0.0  # of those that had the reply before it
        if isinstance(request, CompletionRequest) and request.echo:
            echoed = request.prompt[0] if isinstance(request.prompt, list) else request.prompt
            self._fits = self._fits and isinstance(echoed, str)  # the text of tokens is known to the engine alone
            self._text_chars = -len(echoed) if isinstance(echoed, str) else 0

    @property
    def is_finished(self) -> bool:
        """Whether every reply has said why it ended."""
        return self._unfinished <= 0

    def follow(self, events: list[Event]) -> list[Event]:
        """Take in events; return them as events of the whole reply, whichever replica they are of."""
        if not self._is_first:
            events = [joined for event in events if (joined := self._joined(event)) is not None]
        for event in events:
            if isinstance(event, Delta):
                self._take(event)
            elif isinstance(event, UsageReport):
                self.is_counted = True
        return events

    def resume(self) -> Resume | None:
        """Return from where another replica can go on, or ``None`` if none can, or need."""
        # A token whose text was kept back has no score yet: it is made again, and scored.
        kept = self._tokens[: self._scores] if self._is_scored else self._tokens
        is_told = self._text_chars > 0 or self._calls
        if not self._fits or (self.is_finished and self.is_counted) or (is_told and not kept):
            return None
        return Resume(tuple(kept), max(0, self._text_chars))

    def begin_again(self, resume: Resume) -> None:
        """Another replica goes on from ``resume``."""
        self._is_first = False
        self.tokens_made = len(resume.token_ids)
        del self._tokens[self.tokens_made :]
        self._retold = dict(self._calls)
        self._gpu_seconds_before += self._gpu_seconds
        self._gpu_seconds = 0.0

    def _joined(self, event: Event) -> Event | None:
        """Return what an event of a later replica adds to the reply, or ``None``: a role, or what was told before."""
        match event:
            case UsageReport(usage):
                return UsageReport(replace(usage, gpu_seconds=usage.gpu_seconds + self._gpu_seconds_before))
            case Delta():
                if self.is_finished:
                    return None
                calls = tuple(rest for call in event.tool_calls if (rest := self._untold(call)) is not None)
                seconds = event.gpu_seconds and event.gpu_seconds + self._gpu_seconds_before
                delta = replace(event, tool_calls=calls, gpu_seconds=seconds)
                says = delta.has_content or delta.token_ids or delta.logprobs is not None or delta.finish_reason
                return delta if says else None
        return event

    def _untold(self, call: ToolCallDelta) -> ToolCallDelta | None:
        """Return what a piece of a call adds: a replica that goes on tells each call anew, under an id of its own."""
        if (told := self._retold.get(call.index)) is None:
            return call
        self._retold[call.index] = max(0, told - len(call.arguments))
        return ToolCallDelta(call.index, call.arguments[told:]) if len(call.arguments) > told else None

    def _take(self, delta: Delta) -> None:
        self.tokens_made += len(delta.token_ids)
        self._text_chars += len(delta.text)
        if delta.gpu_seconds:
            self._gpu_seconds = delta.gpu_seconds - self._gpu_seconds_before
        if delta.finish_reason is not None:
            self._unfinished -= 1
        for call in delta.tool_calls:
            self._calls[call.index] = self._calls.get(call.index, 0) + len(call.arguments)
        if delta.refusal or delta.reasoning or self.tokens_made > MOST_TOKENS:
            self._fits = False
        if self._fits:
            self._tokens.extend(delta.token_ids)
            if self._is_scored and delta.logprobs is not None:
                self._scores += _count_scores(delta.logprobs)


class _Scores(Struct, frozen=True):
    content: list[Raw] | None = None  # of chat
    tokens: list[Raw] | None = None  # of completions


def _count_scores(logprobs: Raw) -> int:
    try:
        scores = msgspec.json.decode(logprobs, type=_Scores)
    except msgspec.DecodeError:
        return 0
    return len(scores.content or scores.tokens or ())
