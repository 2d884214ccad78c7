# Names of functions in the alphabet that Gemini takes. A name goes out in a safe form and comes back as the caller gave
# it.

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256

from protocol.chat import ChatRequest

SAFE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}")
STRANGE = re.compile(r"[^a-zA-Z0-9_-]")
KEPT = 40  # characters of a name that is too long, or not safe


def safe_name(name: str) -> str:
    """Return the name of a function as Gemini takes it: the same for the same name, and another for another."""
    if SAFE.fullmatch(name):
        return name
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"_{STRANGE.sub('_', name)[:KEPT]}_{digest}"


def names_given(request: ChatRequest) -> Mapping[str, str]:
    """Return the caller's names of its functions by the safe ones, where these differ."""
    names = (tool.function.name for tool in request.tools or ())
    return {safe: name for name in names if (safe := safe_name(name)) != name}
