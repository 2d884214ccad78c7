# Calls from scripts of web pages (CORS): which pages may make them, and what they may read of an answer. A page calls
# with the key that it has; cookies play no part.

from __future__ import annotations

from litestar.config.cors import CORSConfig

from gateway.core.settings import Settings

# Of the answers' headers, those that clients look at.
SHOWN = [
    *("x-request-id", "request-id", "x-client-request-id", "retry-after", "x-should-retry"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
    *("x-cache", "x-model-used", "x-route-reason", "x-route-score", "content-disposition"),
    *(f"x-tollgate-{what}" for what in ("dropped", "max-tokens", "overhead-ms", "queue-ms")),
]


def cors_of(settings: Settings) -> CORSConfig | None:
    """Return what pages may do; ``None``, which costs a call nothing, where none may."""
    if not settings.cors_origins:
        return None
    return CORSConfig(allow_origins=list(settings.cors_origins), expose_headers=SHOWN)
