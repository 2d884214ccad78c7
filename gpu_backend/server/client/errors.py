# What a client of the engine may be told.
#
#   ServiceError
#   ├── InvalidKey               401  invalid_api_key
#   ├── ForeignPage              403  foreign_page
#   ├── ModelNotFound            404  model_not_found
#   ├── UnknownUrl               404  unknown_url
#   ├── MethodNotAllowed         405  method_not_supported
#   ├── BadRequest               400
#   │   └── ContextLengthExceeded     context_length_exceeded
#   ├── Overloaded               503  overloaded, with retry-after: a full queue, a start, a drain
#   ├── EngineFailed             500  engine_error: the reply broke off, through no fault of the request's shape
#   └── DeadlineExceeded         504  deadline_exceeded: x-deadline-ms passed before the reply's end

from __future__ import annotations

from protocol.errors import BadRequest, NotFound, ServiceError


class InvalidKey(ServiceError):
    """The engine has a secret, and the request does not carry it."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class ForeignPage(ServiceError):
    """A web page has a browser send the request."""

    status = 403
    type = "invalid_request_error"
    code = "foreign_page"


class ModelNotFound(NotFound):
    """This engine serves another model."""

    code = "model_not_found"


class UnknownUrl(NotFound):
    """No route has this path."""

    code = "unknown_url"


class MethodNotAllowed(ServiceError):
    """The path exists; the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_supported"


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


class Overloaded(ServiceError):
    """The engine cannot take the request now; another replica, or this one a little later, can."""

    status = 503
    type = "server_error"
    code = "overloaded"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after)})


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
