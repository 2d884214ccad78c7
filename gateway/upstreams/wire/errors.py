# How upstreams fail.
#
#   UpstreamFailure                an upstream did not give an answer
#   ├── UpstreamError         502  upstream_error: 5xx, reset, cut, our key refused, nonsense
#   ├── UpstreamTimeout       504  upstream_timeout
#   ├── UpstreamBusy          429  its rate limit, with retry-after
#   ├── UpstreamFull          503  overloaded: our own engine's queue is full, or it is going; with retry-after
#   └── UpstreamRefused       4xx  the request itself is at fault: no other target is tried
#       ├── UpstreamTooLong        context_length_exceeded: a model with a longer context may take it
#       ├── UpstreamUnable         the model knows no such parameter: another model of the route may
#       └── UpstreamFiltered       content_policy_violation: by the upstream's own content filter

from __future__ import annotations

from collections.abc import Mapping

from protocol.errors import ServiceError

LONGEST_TOLD = 60  # seconds that a client is told to wait, at the most: another key, or another endpoint, may take it


class UpstreamFailure(ServiceError):
    """An upstream did not give an answer. ``outcome`` is the word for metrics and the attempt's record.

    ``retry_after``: seconds that the upstream asks to wait, when it said.
    """

    outcome = "error"
    moves_on = True  # whether the next target of the route may be tried
    tells_wait = False  # whether the caller is told how long to wait

    def __init__(
        self,
        message: str,
        *,
        outcome: str | None = None,
        retry_after: float | None = None,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if self.tells_wait:
            wait = 1 if retry_after is None else min(LONGEST_TOLD, max(1, -int(-retry_after // 1)))
            headers = {"retry-after": str(wait)} | dict(headers or {})
        super().__init__(message, status=status, type=type, code=code, param=param, headers=headers)
        self.outcome = outcome or self.outcome
        self.retry_after = retry_after


class UpstreamError(UpstreamFailure, status=502, code="upstream_error"):
    """The upstream broke, cut the answer, spoke nonsense, or refused our own key."""


class UpstreamTimeout(UpstreamFailure, status=504, code="upstream_timeout", outcome="timeout"):
    """The upstream took longer than its deadline."""


class UpstreamBusy(UpstreamFailure, status=429, code="rate_limit_exceeded", outcome="rate_limited", tells_wait=True):
    """The upstream's rate limit refused us."""


class UpstreamFull(UpstreamFailure, status=503, code="overloaded", outcome="full", tells_wait=True):
    """One of our own engines is well and takes no more now: its queue is full, it starts, or it drains."""


class UpstreamRefused(UpstreamFailure, status=400, outcome="refused", moves_on=False):
    """The upstream says that the request itself is at fault; the caller is told so in the upstream's words."""


class UpstreamTooLong(UpstreamRefused, code="context_length_exceeded", moves_on=True):
    """The prompt, or the prompt and the answer asked for, is longer than this model's context."""


class UpstreamUnable(UpstreamRefused, code="unsupported_parameter", moves_on=True):
    """This model has no such parameter. Another one of the route may; another endpoint of the same would not."""


class UpstreamFiltered(UpstreamRefused, code="content_policy_violation", outcome="filtered"):
    """The upstream's own content filter forbids the request, or the answer to it: no other upstream is asked for it."""
