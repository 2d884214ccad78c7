# Names of end users and caches as upstreams take them. Clients send longer ones than some take: the user_id of Claude
# Code has some 160 characters, OpenAI's ``user`` ends at 64.

from __future__ import annotations

from hashlib import sha256


def short_id(name: str, most: int) -> str:
    """Return ``name``, or in place of one with more than ``most`` characters its digest: the same for the same name."""
    return name if len(name) <= most else sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
