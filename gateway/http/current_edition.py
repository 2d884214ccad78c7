# The edition of the configuration, for routes that need more of it than the inference port.

from __future__ import annotations

from typing import Any

from litestar import Request

from gateway.inference.edition import Edition, Editions


def edition_of(request: Request[Any, Any, Any]) -> Edition:
    """Return what a call goes by that begins now: the configuration, and what was built of it."""
    editions: Editions = request.app.state.editions
    return editions.current
