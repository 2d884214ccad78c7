# Ids of sessions, which revisions before 2026-07-28 have: a client gets the server's id under a seal of the key that
# opened the session, so that no other key can go on with it, and the gateway has nothing to remember.

from __future__ import annotations

import hmac

from gateway.core.principals import Caller
from gateway.core.settings import McpServer, Settings
from protocol.errors import NotFound

SEAL = 32  # characters


def sealed(ident: str, settings: Settings, server: McpServer, caller: Caller) -> str:
    """Return a session's id as its client is told it."""
    return _seal(ident, settings.key_pepper, server, caller) + ident


def opened(sealed_ident: str, settings: Settings, server: McpServer, caller: Caller) -> str:
    """Return the server's own id of a session. Raises NotFound for one that this key has not opened there."""
    seal, ident = sealed_ident[:SEAL], sealed_ident[SEAL:]
    for pepper in (settings.key_pepper, *settings.other_key_peppers):
        if hmac.compare_digest(_seal(ident, pepper, server, caller).encode(), seal.encode("utf-8", "replace")):
            return ident
    raise NotFound("There is no such session of this key. Begin another with initialize.", code="session_not_found")


def _seal(ident: str, pepper: str, server: McpServer, caller: Caller) -> str:
    told = "\0".join(("mcp session", server.name, server.url, caller.key_id, ident))
    return hmac.digest(pepper.encode(), told.encode("utf-8", "replace"), "sha256").hex()[:SEAL]
