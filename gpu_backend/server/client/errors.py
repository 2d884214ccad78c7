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


class ForeignPage(ServiceError, status=403, code="foreign_page"):
    """A web page has a browser send the request."""


class ModelNotFound(NotFound, code="model_not_found"):
    """This engine serves another model."""


class ContextLengthExceeded(BadRequest, code="context_length_exceeded"):
    """The prompt leaves no room for a reply."""

    def __init__(self, limit: int, tokens: int, param: str, *, counted_whole: bool = True) -> None:
        has = f"{tokens}" if counted_whole else f"at least {tokens}"
        super().__init__(
            f"This model's maximum context length is {limit} tokens, prompt and reply together. "
            f"Your prompt has {has} tokens. Shorten it.",
            param=param,
        )


class EngineFailed(ServiceError, status=500, code="engine_error"):
    """The engine could not finish a reply."""


class DeadlineExceeded(ServiceError, status=504, code="deadline_exceeded"):
    """The reply took longer than its reader would wait."""
