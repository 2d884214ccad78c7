# The pieces of a streamed reply, the same for every upstream format.

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct

from protocol.chat import FinishReason, NativeEnd, Spoken
from protocol.media.images import StreamedPicture
from protocol.messages import ServerBlock
from protocol.usage import Usage


class ToolCallDelta(Struct, frozen=True):
    """A piece of one tool call. The first piece of a call carries its id and name; later ones carry arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Delta(Struct, frozen=True, tag="delta"):
    """What was added to one choice: text, a refusal, reasoning, pieces of tool calls, audio, or its end."""

    index: int = 0
    text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    refusal: str = ""
    reasoning: str = ""
    finish_reason: FinishReason | None = None
    logprobs: Raw | None = None
    token_ids: tuple[int, ...] = ()
    gpu_seconds: float = 0.0  # device time of this choice so far, told by our own engine only
    signature: str = ""  # of the reasoning before it; the model takes that back only with it
    redacted: str = ""  # reasoning that is withheld: opaque, for the model alone
    stop_sequence: str | None = None  # which of them ended the choice, where the upstream says
    citation: Any = None  # of the text around it, in Anthropic's words
    parts_text: bool = False  # what was said is one stretch, what follows another, as its upstream parts them
    native: NativeEnd | None = None  # of a choice that has ended
    server_block: ServerBlock | None = None  # what the upstream asked of a tool of its own, or what that found
    begins_text: bool = False  # the upstream said an empty text, as it does with the role of a reply in words
    audio: bytes = b""  # of speech
    told: dict[str, Raw] | None = None  # the event of a response that said so, where its upstream speaks that API
    used: Usage | None = None  # by a call of a tool of the upstream's, so far, as such events tell
    spoken: Spoken | None = None  # of an answer by voice, whose transcript is the text
    picture: StreamedPicture | None = None

    @property
    def has_content(self) -> bool:
        """Whether this is a first token, or a call of a tool of the upstream's: a role alone, a ping or a comment is
        not."""
        said = self.text or self.tool_calls or self.refusal or self.reasoning or self.redacted
        if said or self.server_block or self.audio or self.used is not None or self.picture is not None:
            return True
        return self.spoken is not None and self.spoken.data != ""


class UsageReport(Struct, frozen=True, tag="usage"):
    """The upstream's own count. A later report replaces an earlier one."""

    usage: Usage
    service_tier: str | None = None  # in which it says that it answered


class ReplyEnd(Struct, frozen=True, tag="end"):
    """The upstream said, in its format's way, that the reply is whole."""


Event = Delta | UsageReport | ReplyEnd
