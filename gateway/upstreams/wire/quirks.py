# What OpenAI-compatible upstreams differ in: under which name they take the output limit, whether they know
# ``stream_options`` and ``reasoning_effort``, whether they have ``/responses``, and whether their chats may hold PDFs.
# A refusal that names one of these, but the last, in its structure is answered by asking again without it; other calls
# are asked so once that answer came whole, within its limit and with its usage.

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal
from urllib.parse import urlsplit

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gateway.upstreams.wire.errors import UpstreamFailure, UpstreamRefused
from router.catalog.targets import Target

log = structlog.get_logger()

# Whose newer models take no ``max_tokens``. Elsewhere that is the name which all services know, and some that don't
# know the other one ignore it in silence.
NEWER_NAME = ("openai.com", "azure.com")
# Whose chats have no part for a PDF.
READ_NO_PDFS = (
    *("azure.com", "groq.com", "mistral.ai", "deepseek.com", "x.ai", "together.xyz", "fireworks.ai"),
    "googleapis.com",
)
# Codes of a refusal that speak of a field's name, not of its value: OpenAI's two, pydantic's two.
UNKNOWN = frozenset({"unsupported_parameter", "unknown_parameter", "extra_forbidden", "value_error.extra"})
IN_WORDS = re.compile(r"Unrecognized request arguments? supplied: reasoning_effort")  # OpenAI's older models
NO_PATH = ("not_found", "status_405", "status_501")  # outcomes of an upstream that has no /responses
LEARNT_FOR = 3600.0  # seconds for which other calls go by what one has found

OutputLimit = Literal["max_tokens", "max_completion_tokens"]
OTHER_NAME: dict[OutputLimit, OutputLimit] = {
    "max_tokens": "max_completion_tokens",
    "max_completion_tokens": "max_tokens",
}


class Quirks(Struct, frozen=True):
    """How one target wants to be asked."""

    output_limit: OutputLimit = "max_completion_tokens"
    stream_options: bool = True  # without them, an upstream that tells no usage is counted by its pieces
    pdfs: bool = True  # a chat may hold one
    effort: bool = True  # else what Anthropic's clients say of thinking is left to the model
    responses: bool = True  # a response is asked of its own API, where the provider has one; else as a chat
    seals: bool = True  # that API seals what its model thinks
    takes_seals: bool = True  # and takes it back; another account's it does not
    for_this_call: bool = False  # by words, which may echo a caller, or by its items: good for the call alone

    def adapted_to(self, refusal: UpstreamRefused, is_native: bool) -> Quirks | None:
        """Return what to try after a refusal of a field as such; ``None`` for refusals of anything else.

        The field is believed where the refusal has it in a place of its own, never from prose: a text may repeat what
        a caller wrote. Prose may drop an effort, which neither caps nor prices a call, for its own call.
        ``is_native``: the caller spoke Anthropic's dialect, and an effort is what we made of its thinking.
        """
        if refusal.code not in UNKNOWN:
            if self.effort and is_native and IN_WORDS.fullmatch(refusal.message):
                return replace(self, effort=False, for_this_call=True)
            return None
        field = (refusal.param or "").partition(".")[0]
        if field == "stream_options" and self.stream_options:
            return replace(self, stream_options=False)
        if refusal.param == self.output_limit:
            return replace(self, output_limit=OTHER_NAME[self.output_limit])
        if field == "reasoning_effort" and self.effort and is_native:
            return replace(self, effort=False)
        return None

    def adapted_to_failed_response(self, failure: UpstreamFailure) -> Quirks | None:
        """Return what to try after a failure of an upstream's own Responses API; ``None``: nothing else."""
        if failure.outcome in NO_PATH:
            return replace(self, responses=False)
        if not isinstance(failure, UpstreamRefused):
            return None
        if failure.code == "invalid_encrypted_content" and self.takes_seals:
            return replace(self, takes_seals=False, for_this_call=True)
        if (failure.param or "").startswith("include") and self.seals:
            return replace(self, seals=False)
        return None


class KnownQuirks:
    """What was learnt of each target, and until when it holds. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._learnt: dict[str, tuple[Quirks, float]] = {}

    def of(self, target: Target, now: float) -> Quirks:
        """Return how to ask a target."""
        if self._learnt and (learnt := self._learnt.get(target.account)) is not None and now < learnt[1]:
            return learnt[0]
        return usual_quirks(target.endpoint.base_url)

    def learn(self, target: Target, quirks: Quirks, now: float) -> None:
        """Ask a target by ``quirks`` from now on: they brought a whole answer, within its limit and counted."""
        if quirks.for_this_call:
            return
        self._learnt[target.account] = (quirks, now + LEARNT_FOR)
        usual = usual_quirks(target.endpoint.base_url)
        changed = [name for name in Quirks.__struct_fields__ if getattr(quirks, name) != getattr(usual, name)]
        log.info("upstream_manners_learnt", target=target.key, fields=changed, seconds=LEARNT_FOR)


@lru_cache(256)
def usual_quirks(base_url: str) -> Quirks:
    """Return how an upstream is asked of which nothing is known yet."""
    host = urlsplit(base_url).hostname or ""

    def is_of(names: tuple[str, ...]) -> bool:
        return any(host == name or host.endswith(f".{name}") for name in names)

    return Quirks("max_completion_tokens" if is_of(NEWER_NAME) else "max_tokens", pdfs=not is_of(READ_NO_PDFS))


@lru_cache(256)
def stores_chats(base_url: str) -> bool:
    """Whether a provider knows ``store`` of a chat; others refuse it."""
    return (urlsplit(base_url).hostname or "").endswith(NEWER_NAME)
