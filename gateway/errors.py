# The gateway's own errors.
#
#   ServiceError
#   ├── InvalidKey            401  invalid_api_key
#   ├── Forbidden             403
#   │   └── TeamSuspended          team_suspended
#   ├── ContentPolicyViolation 400 content_policy_violation: the request, or its answer, may not pass
#   ├── UnknownUrl            404  unknown_url
#   ├── MethodNotAllowed      405  method_not_supported
#   ├── EncodedBody           415  unsupported_encoding
#   ├── Conflict              409  the thing exists already, or is not in a state to be changed so
#   │   ├── IdempotencyKeyReused   idempotency_key_reused: it stands for another request
#   │   └── IdempotencyKeyInUse    idempotency_key_in_use: its call runs for longer than we wait
#   ├── CallTakenOver         503  another gateway runs the call now, and this one's answer does not count
#   ├── StoredAnswerUnreadable 500 idempotency_answer_unreadable
#   ├── Gone                  410  results_erased: they were kept as long as promised, or deleted
#   ├── BatchQueueFull        429  token_limit_exceeded: too much waits in the team's batches
#   ├── StorageFull           429  storage_limit_exceeded: too much lies in the team's files
#   ├── Overloaded            503  overloaded, with retry-after
#   ├── Unavailable           503  a part of the house does not answer
#   │   └── ContentUnchecked       content_check_failed: the outside checker, whose word is needed
#   └── UpstreamFailure            an upstream did not give an answer
#       ├── UpstreamError     502  upstream_error: 5xx, reset, cut, our key refused, nonsense
#       ├── UpstreamTimeout   504  upstream_timeout
#       ├── UpstreamBusy      429  its rate limit, with retry-after
#       ├── UpstreamFull      503  overloaded: our own engine's queue is full, or it is going; with retry-after
#       └── UpstreamRefused   4xx  the request itself is at fault: no other target is tried
#           └── UpstreamFiltered   content_policy_violation: by the upstream's own content filter

from __future__ import annotations

from collections.abc import Mapping

from protocol.errors import NotFound, ServiceError


class InvalidKey(ServiceError):
    """No key, or one that we do not know."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(ServiceError):
    """A known caller may not do this."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class TeamSuspended(Forbidden):
    """The team exists and may not call."""

    code = "team_suspended"


class ContentPolicyViolation(ServiceError):
    """The content policy forbids the request, or the answer to it."""

    status = 400
    type = "invalid_request_error"
    code = "content_policy_violation"


class UnknownUrl(NotFound):
    """No route has this path."""

    code = "unknown_url"


class MethodNotAllowed(ServiceError):
    """The path exists; the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_supported"


class EncodedBody(ServiceError):
    """The body comes compressed."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"


class Conflict(ServiceError):
    """What is asked for contradicts what is there."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class IdempotencyKeyReused(Conflict):
    """The key came with another request before. Trying again cannot help, and SDKs are told so."""

    code = "idempotency_key_reused"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class IdempotencyKeyInUse(Conflict):
    """The call of this key runs for longer than anybody waits."""

    code = "idempotency_key_in_use"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"retry-after": "1"})


class CallTakenOver(ServiceError):
    """Another gateway thought this one dead and runs the call now: what was answered here does not count."""

    status = 503
    code = "service_unavailable"


class StoredAnswerUnreadable(ServiceError):
    """A stored answer was changed, or sealed under another pepper. It is not run again: that would be paid again."""

    status = 500
    code = "idempotency_answer_unreadable"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class Gone(ServiceError):
    """What is asked for was here and has been erased."""

    status = 410
    type = "invalid_request_error"
    code = "results_erased"


class BatchQueueFull(ServiceError):
    """A team's batches have as many tokens waiting as they may. Trying again at once cannot help."""

    status = 429
    type = "rate_limit_error"
    code = "token_limit_exceeded"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class StorageFull(ServiceError):
    """A team's files have as many bytes as they may."""

    status = 429
    type = "rate_limit_error"
    code = "storage_limit_exceeded"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class Overloaded(ServiceError):
    """No target can take the request in time."""

    status = 503
    type = "server_error"
    code = "overloaded"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after)})


class Unavailable(ServiceError):
    """A part of the house that this request needs does not answer."""

    status = 503
    type = "server_error"
    code = "service_unavailable"

    def __init__(self, message: str, retry_after: int = 2) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after)})


class ContentUnchecked(Unavailable):
    """The outside checker failed, and what it has not judged may not pass."""

    code = "content_check_failed"

    def __init__(self, message: str = "The content of this request could not be checked. Try again later.") -> None:
        super().__init__(message, retry_after=1)


class UpstreamFailure(ServiceError):
    """An upstream did not give an answer. ``outcome`` is the word for metrics and the attempt's record."""

    outcome = "error"
    moves_on = True  # whether the next target of the route may be tried
    retry_after: float | None = None  # seconds that the upstream asks to wait, when it said

    def __init__(
        self,
        message: str,
        *,
        outcome: str | None = None,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, status=status, type=type, code=code, param=param, headers=headers)
        self.outcome = outcome or self.outcome


class UpstreamError(UpstreamFailure):
    """The upstream broke, cut the answer, spoke nonsense, or refused our own key."""

    status = 502
    type = "server_error"
    code = "upstream_error"


class UpstreamTimeout(UpstreamFailure):
    """The upstream took longer than its deadline."""

    status = 504
    type = "server_error"
    code = "upstream_timeout"
    outcome = "timeout"


class UpstreamBusy(UpstreamFailure):
    """The upstream's rate limit refused us. ``retry_after`` is seconds, when it said."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    outcome = "rate_limited"

    def __init__(self, message: str, *, retry_after: float | None = None, outcome: str | None = None) -> None:
        wait = 1 if retry_after is None else max(1, -int(-retry_after // 1))
        super().__init__(message, outcome=outcome, headers={"retry-after": str(wait)})
        self.retry_after = retry_after


class UpstreamFull(UpstreamFailure):
    """An engine of ours is well and takes no more now: its queue is full, it starts, or it drains."""

    status = 503
    type = "server_error"
    code = "overloaded"
    outcome = "full"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        wait = 1 if retry_after is None else max(1, -int(-retry_after // 1))
        super().__init__(message, headers={"retry-after": str(wait)})
        self.retry_after = retry_after


class UpstreamRefused(UpstreamFailure):
    """The upstream says that the request itself is at fault; the caller is told so in the upstream's words."""

    status = 400
    type = "invalid_request_error"
    outcome = "refused"
    moves_on = False


class UpstreamFiltered(UpstreamRefused):
    """The upstream's own content filter forbids the request, or the answer to it: nobody else is asked for it."""

    code = "content_policy_violation"
    outcome = "filtered"
