# What a client of the engine may be told beside the errors of protocol/errors.py, such as Overloaded: a full queue, a
# start, a drain.
#
#   ServiceError
#   ├── ForeignPage              403  foreign_page
#   ├── ModelNotFound            404  model_not_found
#   ├── BadRequest               400
#   │   └── ContextLengthExceeded     context_length_exceeded
#   ├── EngineFailed             500  engine_error: the reply broke off, through no fault of the request's shape
#   └── DeadlineExceeded         504  deadline_exceeded: x-deadline-ms passed before the reply's end

from __future__ import annotations

from protocol.errors import BadRequest, NotFound, ServiceError


class ForeignPage(ServiceError):
    """A web page has a browser send the request."""

    status = 403
    type = "invalid_request_error"
    code = "foreign_page"


class ModelNotFound(NotFound):
    """This engine serves another model."""

    code = "model_not_found"


class ContextLengthExceeded(BadRequest):
    """The prompt leaves no room for a reply."""

    code = "context_length_exceeded"

    def __init__(self, limit: int, tokens: int, param: str, *, counted_whole: bool = True) -> None:
        has = f"{tokens}" if counted_whole else f"at least {tokens}"
        super().__init__(
            f"This model's maximum context length is {limit} tokens, prompt and reply together. "
            f"Your prompt has {has} tokens. Shorten it.",
            param=param,
        )


class EngineFailed(ServiceError):
    """The engine could not finish a reply."""

    status = 500
    type = "server_error"
    code = "engine_error"


class DeadlineExceeded(ServiceError):
    """The reply took longer than its reader would wait."""

    status = 504
    type = "server_error"
    code = "deadline_exceeded"
