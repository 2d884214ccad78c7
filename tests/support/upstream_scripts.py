# Scripts for the scripted upstream: how one request is answered, or in which way it goes wrong.
# A script has a name and numbers and can be written as text, so that it fits into a model's name or an API key:
# "gpt-4o:reset,after=3" or "sk-one:tokens=16,pace=0.02".

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import Struct


class Fault(StrEnum):
    """What goes wrong."""

    HANG_BEFORE_HEADERS = "hang-before-headers"
    RESET_BEFORE_HEADERS = "reset-before-headers"
    HANG = "hang"  # silence after ``after`` tokens
    RESET = "reset"  # TCP reset after ``after`` tokens
    BROKEN = "broken"  # the connection closes after ``after`` tokens, the body has no end
    CUT = "cut"  # the body ends regularly after ``after`` tokens: no finish_reason, no [DONE]
    NO_DONE = "no-done"  # everything but [DONE]
    LOST_END = "lost-end"  # everything but [DONE], then a TCP reset
    LATE_END = "late-end"  # everything but [DONE], then silence
    NO_FINISH = "no-finish"  # [DONE] without a finish_reason
    MALFORMED = "malformed"  # half a JSON object after ``after`` tokens
    ERROR_FRAME = "error-frame"  # an error object after ``after`` tokens, then the end
    ERROR_FIRST = "error-first"  # an error object is the first event, under a 200
    ROLE_ONLY = "role-only"  # the role delta, then silence
    PINGS_ONLY = "pings-only"  # comments every 20 ms, never an event
    BIG_CHUNK = "big-chunk"  # one token of 10 MiB
    DRIP = "drip"  # single bytes, each a TCP segment
    NO_STREAM = "no-stream"  # a whole answer, streamed or not
    NOT_JSON = "not-json"  # an HTML page under a 200


class Told(StrEnum):
    """What the upstream says of its usage."""

    RIGHT = "right"
    WRONG = "wrong"  # nonsense numbers
    NONE = "none"


class Shape(StrEnum):
    """How a refusal of an unknown field is written."""

    OPENAI = "openai"  # with ``param`` and ``code``
    PYDANTIC = "pydantic"  # FastAPI's ``detail``, which repeats what the caller wrote
    WORDS = "words"  # a sentence alone


class Script(Struct, frozen=True, kw_only=True):
    """How one request is answered. Times are seconds; ``after`` counts tokens sent before the fault."""

    latency: float = 0.0  # before the headers
    first_token: float = 0.0  # between the role delta and the first token
    pace: float = 0.0  # between tokens
    tokens: int | None = None  # how long the answer is; None: the request decides
    text: str | None = None  # the answer's words; None: the request decides
    calls: bool = False  # its first tool, whatever is said
    finish: str = "stop"
    refuses: bool = False
    unknown: str | None = None  # a field that it refuses as such,
    says_so: Shape = Shape.OPENAI  # in this shape
    thinking: str | None = None  # what it thinks before it speaks
    cached_tokens: int = 0
    audio_tokens: int = 0  # of the prompt, that it heard
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    served: str | None = None  # the service tier that it says, whichever was asked
    usage: Told = Told.RIGHT
    fault: Fault | None = None
    after: int = 2
    status: int = 200
    code: str | None = None
    type: str = "server_error"
    message: str = "Scripted."
    retry_after: str | None = None  # the header as it is sent; "date:2" is an HTTP date in two seconds
    retry_after_ms: str | None = None
    left: str | None = None  # what rate-limit headers say of requests: how many are left, of how many, for how long


OPENLY = "You exceeded your current quota, please check your plan and billing details."

# Scripts by name. Every Fault is one, too.
NAMED: dict[str, Script] = {
    "400": Script(status=400, type="invalid_request_error", code="invalid_value", message="That is not a value."),
    "401": Script(status=401, type="invalid_request_error", code="invalid_api_key", message="Incorrect API key."),
    "403": Script(status=403, type="invalid_request_error", code="unsupported_country", message="Not from here."),
    "404": Script(status=404, type="invalid_request_error", code="model_not_found", message="No such model."),
    "413": Script(status=413, type="invalid_request_error", message="Too large."),
    "429": Script(status=429, type="requests", code="rate_limit_exceeded", message="Rate limit reached."),
    "429-seconds": Script(status=429, type="requests", code="rate_limit_exceeded", retry_after="2"),
    "429-date": Script(status=429, type="requests", code="rate_limit_exceeded", retry_after="date:2"),
    "429-ms": Script(status=429, type="tokens", code="rate_limit_exceeded", retry_after_ms="1500", retry_after="2"),
    "429-too-large": Script(
        status=429,
        type="tokens",
        code="rate_limit_exceeded",
        message="Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 41000.",
    ),
    "insufficient-quota": Script(status=429, type="insufficient_quota", code="insufficient_quota", message=OPENLY),
    "500": Script(status=500),
    "502": Script(status=502, message="Bad gateway."),
    "503": Script(status=503, code="server_is_overloaded", message="The server is overloaded."),
    "full": Script(status=503, code="overloaded", message="Too many wait.", retry_after="3"),  # our own engine's
    "529": Script(status=529, type="overloaded_error", message="Overloaded."),
    "refused-key": Script(
        status=401, type="invalid_request_error", code="invalid_api_key", message="Incorrect API key."
    ),
    "wrong-usage": Script(usage=Told.WRONG),
    "no-usage": Script(usage=Told.NONE),
    "refusal": Script(refuses=True),
    "content-filter": Script(finish="content_filter"),
    **{str(fault): Script(fault=fault) for fault in Fault},
}


def parse_script(text: str) -> Script:
    """Return the script that ``text`` means: an optional name, then ``field=value`` pairs, separated by commas."""
    words = text.split(",")
    fields = msgspec.structs.asdict(NAMED[words.pop(0)]) if "=" not in words[0] else {}
    fields |= dict(word.split("=", 1) for word in words)
    return msgspec.convert(fields, Script, strict=False)
