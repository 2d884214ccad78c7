# The gateway's own errors; those that engines have, too, are in protocol/errors.py.
#
#   ServiceError
#   ├── Forbidden             403
#   │   ├── TeamSuspended          team_suspended
#   │   ├── AddressNotAllowed      address_not_allowed: the key is for calls from elsewhere
#   │   └── EndpointNotAllowed     endpoint_not_allowed: the key is for other endpoints
#   ├── ContentPolicyViolation 400 content_policy_violation: the request, or its answer, may not pass
#   ├── RpcError              400  invalid_request: a message of JSON-RPC breaks a rule of its protocol
#   ├── EncodedBody           415  unsupported_encoding
#   ├── UpgradeRequired       426  upgrade_required: a WebSocket is spoken here
#   ├── Conflict              409  the thing exists already, or is not in a state to be changed so
#   │   ├── IdempotencyKeyReused   idempotency_key_reused: it stands for another request
#   │   ├── IdempotencyKeyInUse    idempotency_key_in_use: its call runs for longer than we wait
#   │   └── AnswerNotKept          idempotency_answer_not_kept: it was given once, and was too long to be kept
#   ├── CallTakenOver         503  another gateway runs the call now, and this one's answer does not count
#   ├── StoredAnswerUnreadable 500 idempotency_answer_unreadable
#   ├── StoredResponseUnreadable 500 stored_response_unreadable
#   ├── ContentsUnreadable    500  contents_unreadable: of a call
#   ├── Gone                  410  results_erased: they were kept as long as promised, or deleted
#   ├── BatchQueueFull        429  token_limit_exceeded: too much waits in the team's batches
#   ├── TooManyInBackground   429  rate_limit_exceeded: as many responses of the team run as may at once
#   ├── StorageFull           429  storage_limit_exceeded: too much of the team's lies here
#   ├── Unavailable           503  service_unavailable: the gateway closes, or a part other than a store fails
#   │   └── ContentUnchecked       content_check_failed: the external checker, whose verdict is needed
#   └── UpstreamFailure            an upstream did not give an answer: upstreams/wire/errors.py

from __future__ import annotations

from protocol.errors import BadRequest, ServiceError

DO_NOT_RETRY = {"x-should-retry": "false"}
RETRY_SOON = {"retry-after": "1"}


class Forbidden(ServiceError, status=403, type="permission_error", code="permission_denied", quotes=False):
    """A known caller may not do this."""


class TeamSuspended(Forbidden, code="team_suspended"):
    """The team exists and may not call."""


class AddressNotAllowed(Forbidden, code="address_not_allowed", quotes=True):
    """The key is right, and may not be used from where the request comes."""


class EndpointNotAllowed(Forbidden, code="endpoint_not_allowed"):
    """The key is right, and is for calls to other endpoints."""


class ContentPolicyViolation(ServiceError, status=400, code="content_policy_violation", quotes=False):
    """The content policy forbids the request, or the answer to it."""


class RpcError(BadRequest):
    """The message breaks a rule of the protocol. ``rpc_code`` is JSON-RPC's, ``data`` what it says besides."""

    def __init__(
        self,
        message: str,
        rpc_code: int = -32600,
        *,
        status: int = 400,
        code: str = "invalid_request",
        data: object = None,
    ) -> None:
        super().__init__(message, status=status, code=code)
        self.rpc_code = rpc_code
        self.data = data


class EncodedBody(ServiceError, status=415, code="unsupported_encoding", quotes=False):
    """The body comes compressed."""


class UpgradeRequired(ServiceError, status=426, code="upgrade_required", usual_headers={"upgrade": "websocket"}):
    """The path is for a WebSocket, and none was asked for."""


class Conflict(ServiceError, status=409, code="conflict"):
    """What is asked for contradicts what is there."""


class IdempotencyKeyReused(Conflict, code="idempotency_key_reused", usual_headers=DO_NOT_RETRY, quotes=False):
    """The key came with another request before. Trying again cannot help, and SDKs are told so."""


class IdempotencyKeyInUse(Conflict, code="idempotency_key_in_use", usual_headers=RETRY_SOON, quotes=False):
    """The call of this key runs for longer than a repeat waits."""


class AnswerNotKept(Conflict, code="idempotency_answer_not_kept", usual_headers=DO_NOT_RETRY, quotes=False):
    """The key's call was answered, and charged, at greater length than is kept. It is not run, or paid, again."""


class CallTakenOver(ServiceError, status=503, code="service_unavailable"):
    """Another gateway took this one for dead and runs the call now: the answer from here does not count."""


class StoredAnswerUnreadable(
    ServiceError, status=500, code="idempotency_answer_unreadable", usual_headers=DO_NOT_RETRY
):
    """A stored answer was changed, or sealed under another pepper. It is not run again: that would be paid again."""


class StoredResponseUnreadable(ServiceError, status=500, code="stored_response_unreadable", usual_headers=DO_NOT_RETRY):
    """A stored response was changed, or sealed under another pepper, or has an item that nothing here can send back."""


class ContentsUnreadable(ServiceError, status=500, code="contents_unreadable", usual_headers=DO_NOT_RETRY):
    """The contents of a call were changed, or sealed under another pepper."""


class Gone(ServiceError, status=410, code="results_erased"):
    """What is asked for was here and has been erased."""


class BatchQueueFull(ServiceError, status=429, code="token_limit_exceeded", usual_headers=DO_NOT_RETRY):
    """A team's batches have as many tokens waiting as they may. Trying again at once cannot help."""


class TooManyInBackground(ServiceError, status=429, code="rate_limit_exceeded", usual_headers=RETRY_SOON):
    """As many responses of a team run in the background as may at once."""


class StorageFull(ServiceError, status=429, code="storage_limit_exceeded", usual_headers=DO_NOT_RETRY):
    """A team's files, or its stored responses, have as many bytes as they may."""


class Unavailable(ServiceError, status=503, code="service_unavailable"):
    """The gateway closes, or a part that this request needs, other than a store, does not answer."""

    def __init__(self, message: str, retry_after: int = 2) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after)})


class ContentUnchecked(Unavailable, code="content_check_failed"):
    """The external checker failed, and what it has not judged may not pass."""

    def __init__(self, message: str = "The content of this request could not be checked. Try again later.") -> None:
        super().__init__(message, retry_after=1)
