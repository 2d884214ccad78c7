# The OpenAI wire format: OpenAI itself, every compatible service, and our own engine. Requests are written in
# request.py, replies read in replies.py and events.py; here is what failures of its own kind mean.

from __future__ import annotations

from collections.abc import Mapping

from gateway.upstreams.openai.events import OpenAIEvents
from gateway.upstreams.openai.media_events import PictureEvents, TranscriptionEvents
from gateway.upstreams.openai.replies import read_whole
from gateway.upstreams.openai.request import write_count, write_request
from gateway.upstreams.openai.speech import SpeechEvents
from gateway.upstreams.wire.base import Asking, EventStream, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError, UpstreamFailure, UpstreamFull, UpstreamUnable
from gateway.upstreams.wire.filters import STATUSES, read_filtered
from gateway.upstreams.wire.reading import read_error_fields, read_refused_field, read_retry_after, usual_failure
from protocol.inference import Request, WholeReply, choices_asked
from protocol.media.audio import SpeechRequest, TranscriptionRequest
from protocol.media.images import ImageRequest
from protocol.usage import Usage


class OpenAIFormat:
    """Speaks OpenAI's dialect to an upstream."""

    def build_request(self, asking: Asking) -> UpstreamRequest:
        """Return the request: the decoded fields encoded again, the model under its upstream name."""
        return write_request(asking)

    def build_count(self, asking: Asking) -> UpstreamRequest:
        """Return the request for an engine's POST /tokenize."""
        return write_count(asking)

    def read_reply(self, request: Request, body: bytes) -> tuple[WholeReply, Usage | None]:
        """Return the reply that ``body`` holds, whichever kind ``request`` asked for."""
        try:
            return read_whole(request, body)
        except UpstreamError:
            if (filtered := read_filtered(read_error_fields(body))) is not None:  # some say it under a 200
                raise filtered from None
            raise

    def open_events(self, request: Request) -> EventStream:
        """Return a reader for a streamed chat completion or completion, for speech, what is written of it, or a
        picture."""
        if isinstance(request, SpeechRequest):
            return SpeechEvents()
        if isinstance(request, TranscriptionRequest):
            return TranscriptionEvents()
        if isinstance(request, ImageRequest):
            return PictureEvents()
        return OpenAIEvents(choices_asked(request))

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> UpstreamFailure:
        """Return what a failing answer means: whose fault it is, and whether another target may be tried."""
        error = read_error_fields(body)
        if status in STATUSES and (filtered := read_filtered(error, status)) is not None:
            return filtered
        message, code = error.get("message", ""), error.get("code")
        if status == 429 and code == "insufficient_quota":
            return UpstreamBusy("The gateway's own account at the upstream is used up.", outcome="spend_cap")
        if status == 503 and code == "overloaded":  # our own engine's word
            return UpstreamFull(
                "Every engine of this model is busy. Try again soon.", retry_after=read_retry_after(headers)
            )
        param, kind = read_refused_field(error)
        if status == 400 and code == UpstreamUnable.code:
            return UpstreamUnable(message or "The upstream does not know a parameter.", param=param)
        return usual_failure(status, headers, message, code=kind, param=param)
