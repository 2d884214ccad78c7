# Fields of a request that change no meaning of it: a provider that refuses one is asked without, which its caller is
# told.

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from msgspec.structs import replace

from gateway.core.settings import DROPPABLE
from gateway.upstreams.wire.unsayable import FORCED_BIAS
from protocol.inference import Request

SomeRequest = TypeVar("SomeRequest", bound=Request)


def without_fields(request: SomeRequest, names: Collection[str]) -> tuple[SomeRequest, tuple[str, ...]]:
    """Return a request without these of its fields, and the names of those that it had."""
    if not names:
        return request, ()
    gone = tuple(name for name in DROPPABLE if name in names and _is_said(request, name))
    return (replace(request, **dict.fromkeys(gone)), gone) if gone else (request, ())


def _is_said(request: Request, name: str) -> bool:
    value = getattr(request, name, None)
    if isinstance(value, dict) and name == "logit_bias":
        return all(abs(bias) < FORCED_BIAS for bias in value.values())
    return value is not None
