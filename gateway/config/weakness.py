# What makes a secret weak: too short, too uniform, copied from an example, or the name of a variable
# that was meant. And which URLs can only be a mistake.

from __future__ import annotations

import re
from ipaddress import ip_address

from gateway.egress.addresses import METADATA, SPECIAL

LEAST_LENGTH = 20  # characters: 80 bits even in hexadecimal
LEAST_DIFFERENT = 8  # characters: a random text that is long enough has more
REMEDY = "make one with `openssl rand -hex 32`"

_EXAMPLE = re.compile(
    r"change.?me|change.?this|replace.?(me|this|with)|placeholder|passw(or)?d|example|secret.?key|admin.?key|key.?pepper"
    r"|your.(own|key|secret|pepper)|insert.?(your|key)|to.?be.?set|letmein|qwerty|1234567|abcdefg|xxxxxx",
    re.IGNORECASE,
)
_BARE_VARIABLE = re.compile(r"(?:^|[:/@])(?:\$([A-Za-z_]\w*)|\$\(([A-Za-z_]\w*)\))(?=$|[:/@?])", re.ASCII)
_METADATA_NAMES = {"metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"}


def why_weak(secret: str) -> str | None:
    """Return what is wrong with a secret that gives access to the deployment, in words that do not show it."""
    if len(secret) < LEAST_LENGTH:
        return f"a secret of {len(secret)} characters can be guessed, {LEAST_LENGTH} are the least; {REMEDY}"
    if len(set(secret)) < LEAST_DIFFERENT:
        return f"only {len(set(secret))} different characters, which can be guessed; {REMEDY}"
    if _EXAMPLE.search(secret) is not None:
        return f"the secret of an example, which is no secret; {REMEDY}"
    return None


def meant_variable(text: str) -> str | None:
    """Return the variable that was meant where a text, or a part of a URL, is its name as a shell has it."""
    match = _BARE_VARIABLE.search(text)
    return None if match is None else match[1] or match[2]


def why_no_service(host: str) -> str | None:
    """Return why no HTTP server can be at ``host``."""
    is_metadata = host.lower().rstrip(".") in _METADATA_NAMES
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return _GIVES_AWAY if is_metadata else None
    mapped = getattr(address, "ipv4_mapped", None) or address
    if mapped in METADATA or any(mapped in network for network in SPECIAL["a link-local"]):
        return _GIVES_AWAY
    return None


_GIVES_AWAY = "a link-local or metadata address, where a cloud gives out credentials: no service lives there"
