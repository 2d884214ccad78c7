# The root of every error a client may see, and the two shapes that the API dialects give it.
#
#   ServiceError
#   ├── BadRequest            400  invalid_request_error
#   │   └── UnsupportedParameter   code unsupported_parameter
#   ├── InvalidKey            401  invalid_api_key
#   ├── NotFound              404
#   │   └── UnknownUrl             unknown_url
#   ├── MethodNotAllowed      405  method_not_supported
#   ├── TooLarge              413
#   ├── Overloaded            503  overloaded, with retry-after
#   └── …                     each package's errors.py adds its own

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self


class Unshown:
    """A struct whose repr shows no secret of its fields: logs, tracebacks and tests that fail may print it."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the struct as msgspec does, what a field with a secret's name holds left out."""
        fields = ((name, getattr(self, name, None)) for name in getattr(self, "__struct_fields__", ()))
        shown = (f"{name}={'…' if value and _SECRET.search(name) else repr(value)}" for name, value in fields)
        return f"{type(self).__name__}({', '.join(shown)})"


_SECRET = re.compile(r"(^|_)(keys?|secrets?|peppers?|tokens?|passwords?|authorization|headers|url|proxy)$")


class ServiceError(Exception):
    """Something went wrong that the caller should hear of.

    The message says what happened and what the caller can do. ``type`` and ``code`` are stable words of the OpenAI
    dialect (WIRE conventions); ``param`` names the field at fault; ``headers`` travel with the answer.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None
    usual_headers: Mapping[str, str] = {}  # that travel with every error of a class
    limit: str = ""  # which of the caller's limits refuses, for metrics: team.usd_per_day
    quotes: bool = True  # whether messages may hold words of the request's: then ``kept`` is what can be kept of one
    kept: str | None = None

    def __init_subclass__(cls, **facts: Any) -> None:
        """Take what a class says of itself in its head; a ``status`` brings the usual ``type`` of that status."""
        if (status := facts.get("status", 500)) < 500:
            facts = {"type": "rate_limit_error" if status == 429 else "invalid_request_error"} | facts
        for name, fact in facts.items():
            assert hasattr(cls, name), f"{cls.__name__} has no {name}"
            setattr(cls, name, fact)

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status if status is not None else self.status
        self.type = type if type is not None else self.type
        self.code = code if code is not None else self.code
        self.param = param
        self.headers: dict[str, str] = {**self.usual_headers, **(headers or {})}
        self.facts: Mapping[str, Any] = {}  # what the error object says besides
        if not self.quotes:
            self.kept = message

    def keeping(self, words: str) -> Self:
        """Have ``words`` kept with the call in place of the message: they hold no word of the request's."""
        self.kept = words
        return self

    def body(self, request_id: str = "") -> dict[str, object]:
        """Return the error object of the OpenAI dialect: its four keys are always there, then the request's id, where
        there is one, and ``facts``."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": told | ({"request_id": request_id} if request_id else {}) | dict(self.facts)}


class BadRequest(ServiceError, status=400):
    """The request cannot be understood or breaks a rule of the API."""


class UnsupportedParameter(BadRequest, code="unsupported_parameter"):
    """A parameter that no target of the route can honour."""


class InvalidKey(ServiceError, status=401, code="invalid_api_key"):
    """No key, or one that is not known here."""


class NotFound(ServiceError, status=404, code="not_found"):
    """What was asked for does not exist, or belongs to another caller: the two look alike."""


class UnknownUrl(NotFound, code="unknown_url"):
    """No route has this path."""


class MethodNotAllowed(ServiceError, status=405, code="method_not_supported"):
    """The path exists; the method does not."""


class TooLarge(ServiceError, status=413, code="request_too_large", quotes=False):
    """The body is longer than we read."""


class Overloaded(ServiceError, status=503, code="overloaded"):
    """The request cannot be taken in time: no target or no room for it, or a store that it needs does not answer."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after)})


def invalid_value(param: str, rule: str) -> BadRequest:
    """Return the error for a parameter that breaks a rule, such as "must be a whole number": in words of ours alone."""
    return invalid_param(param, f"'{param}' {rule}.").keeping(f"It {rule}.")


def invalid_param(param: str, message: str) -> BadRequest:
    """Return the error for a parameter whose value is wrong; ``message`` says why."""
    return BadRequest(message, param=param, code="invalid_value")


def missing_param(param: str, message: str) -> BadRequest:
    """Return the error for a parameter that is missing; ``message`` says what to send."""
    return BadRequest(message, param=param, code="missing_required_parameter")


def not_supported(name: str, right: str) -> UnsupportedParameter:
    """Return the error for a field, by a name of ours, that cannot be honoured; ``right`` says what to do."""
    words = f"'{name}' is not supported by this gateway. {right}"
    return UnsupportedParameter(words, param=name).keeping(words)
