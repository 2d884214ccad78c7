# Names of end users and caches as upstreams take them. Clients send longer ones than some take: the user_id of Claude
# Code has some 160 characters, OpenAI's ``user`` ends at 64.

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256

from protocol.chat import ChatRequest


def names_given(request: ChatRequest, safe_name: Callable[[str], str]) -> Mapping[str, str]:
    """Return the caller's names of its tools by the safe ones, where these differ."""
    names = (tool.function.name for tool in request.tools or ())
    return {safe: name for name in names if (safe := safe_name(name)) != name}


def digest_of(text: str) -> str:
    """Return 16 characters that stand for a text."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def short_id(name: str, most: int) -> str:
    """Return ``name``, or in place of one with more than ``most`` characters its digest: the same for the same name."""
    return name if len(name) <= most else sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
