# What the app that serves a request holds: for routes that need more than the inference port.

from __future__ import annotations

from typing import Any

from litestar import Request

from gateway.inference.services import Services


def services_of(request: Request[Any, Any, Any]) -> Services:
    """Return the services of the app that serves ``request``."""
    return request.app.state.services
