# Where the events of a reply come from: one upstream; or, when a replica of our own engine dies in mid-stream, another
# that goes on from the tokens already made. The client sees a pause, and the text that the first would have written.

from __future__ import annotations

from contextlib import suppress

import structlog
from msgspec.structs import replace

from gateway.calls.answering import Answering
from gateway.calls.resume_state import Progress
from gateway.core.clock import Clock
from gateway.inference.attempt import AttemptContext
from gateway.inference.dispatcher import Dispatcher
from gateway.telemetry.meters import counter_of
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.wire.base import Resume
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure, UpstreamTimeout
from protocol.completions import CompletionRequest
from protocol.errors import ServiceError
from protocol.events import Event, ReplyEnd
from protocol.media.audio import SpeechRequest
from protocol.media.images import ImageRequest

LOST = ("reset", "timeout", "deadline")  # words for a connection that broke or fell silent, whatever had come by then
MOST_REPLICAS = 3  # that one reply is given to, each once: one that has ended them all may itself be what ends them

log = structlog.get_logger()


class FailoverStream:
    """The events of one reply, from whichever upstream. ``answering`` is the upstream that speaks now.

    Take the events in ``first``, then those of ``next_events``.
    """

    def __init__(
        self, dispatcher: Dispatcher, context: AttemptContext, answering: Answering, clock: Clock, metrics: Metrics
    ) -> None:
        self.answering = answering
        self._dispatcher = dispatcher
        self._context = context
        self._call = context.call
        self._clock = clock
        self._metrics = metrics
        self._grew = clock.monotonic()  # since when its next token is awaited
        self._replicas = {answering.target.key}  # that this reply was given to
        self._progress = Progress(context.call.request) if answering.provider.self_hosted and answering.events else None
        self.first = self._follow(answering.first)

    @property
    def tokens_made(self) -> int:
        """How many tokens the reply has, where its upstream names them; else 0."""
        return self._progress.tokens_made if self._progress is not None else 0

    async def next_events(self, *, has_grown: bool) -> list[Event]:
        """Return what came next, and together; ``has_grown`` tells whether a token has come since the last time.

        Raises UpstreamFailure when the reply breaks and no upstream goes on with it.
        """
        try:
            return self._follow(await self._read(has_grown))
        except UpstreamFailure as failure:
            self._dispatcher.note_broken(self._context, self.answering, failure)
            return self._follow(await self._go_on(failure))

    def close(self) -> None:
        """Close the upstream that speaks now."""
        self.answering.close()

    def _follow(self, events: list[Event]) -> list[Event]:
        return events if self._progress is None else self._progress.follow(events)

    async def _read(self, has_grown: bool) -> list[Event]:
        answering, now = self.answering, self._clock.monotonic()
        assert answering.response is not None and answering.events is not None
        if answering.events.failure is not None:
            raise answering.events.failure
        # Its next token is awaited from now on: what a slow client took is not the upstream's. Of our own engine any
        # word is enough: it says that it lives while a reply has to wait there.
        if has_grown or self._progress is not None:
            self._grew = now
        timeouts = answering.provider.timeouts
        silent, late = self._grew + timeouts.between_tokens, self._call.started + timeouts.total
        if isinstance(self._call.request, ImageRequest):  # between a picture and the next minutes may pass
            silent = late
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

    async def _go_on(self, failure: UpstreamFailure) -> list[Event]:
        """Return the first events of another replica that goes on. Raises ``failure`` where there is none."""
        progress, broken = self._progress, self.answering
        if progress is None:
            tells_its_end = not isinstance(self._call.request, SpeechRequest)  # audio ends where its bytes do
            if failure.outcome in LOST and broken.events is not None and tells_its_end:
                with suppress(UpstreamFailure):
                    return broken.events.finish()  # it had said why it ends: every word is here
            raise failure
        broken.close()
        resume = progress.resume() if failure.moves_on else None
        if resume is not None and len(self._replicas) < MOST_REPLICAS:
            try:
                self.answering = await self._find_another(resume, failure)
            except ServiceError as exc:
                log.info("not_continued", request_id=self._call.request_id, error=exc.message)
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
        context, broken = self._context, self.answering
        model = broken.target.model.name, broken.target.model.provider
        others = [
            one
            for one in context.route.targets
            if (one.model.name, one.model.provider) == model and one.key not in self._replicas
        ]
        rest = replace(context.route, targets=tuple(others))
        context = self._dispatcher.go_on(context, rest, broken.provider, resume)
        request = context.call.request
        if isinstance(request, CompletionRequest):  # the echo is out
            context = replace(context, call=replace(context.call, request=replace(request, echo=None)))
        return await self._dispatcher.try_targets(context, failure=failure)

    def _tell(self, outcome: str, broken: Answering, failure: UpstreamFailure) -> None:
        counter_of(self._metrics.continuations, broken.target.model.name, outcome).inc()
        log.warning(
            f"reply_{outcome}",
            request_id=self._call.request_id,
            broken=broken.target.key,
            failure=failure.outcome,
            tokens=self.tokens_made,
        )
