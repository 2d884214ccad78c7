# Names of functions in the alphabet that Gemini takes. A name goes out in a safe form and comes back as the caller gave
# it.

from __future__ import annotations

import re

from gateway.upstreams.wire.short_ids import digest_of

SAFE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}")
STRANGE = re.compile(r"[^a-zA-Z0-9_-]")
KEPT = 40  # characters of a name that is too long, or not safe


def safe_name(name: str) -> str:
    """Return the name of a function as Gemini takes it: the same for the same name, and another for another."""
    if SAFE.fullmatch(name):
        return name
    return f"_{STRANGE.sub('_', name)[:KEPT]}_{digest_of(name)}"
