# No struct shows a secret that it holds: what is printed by a log, a traceback or a test that fails.

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gateway.accounts.key_lookup import KeyLookup
from gateway.egress.urls import read_url
from gateway.upstreams.bedrock.signing import Credentials

ROOT = Path(__file__).parents[2]
FIELD = re.compile(
    r"^class (\w+)(?:\((.*?)\))?:|^    (?!prompt_cache_key)(\w+): [^\n(]*\b(?:str|Raw)\b[^\n]*(?<!,)$",
    re.MULTILINE | re.DOTALL,
)
SECRET = re.compile(
    r"(^|_)(key|(api|admin|team|metrics|provider)_keys?|(hash|access|secret|private)_key|secrets?|peppers?|passwords?"
    r"|((access|id)_)?token|authorization|(database|redis|webhook|callback)_(direct_)?url|proxy)$"
)
NONE = {
    "Call.idempotency_key": "its client's own name of a request",
    "Create.idempotency_key": "the same",
    "Place.key": "the same",
    "KeyRecord.pepper": "the name of one",
    "Tag.key": "of a tag",
    "TopToken.token": "a piece of text",
}


def test_no_struct_shows_a_secret() -> None:
    """A struct with a field that is called as secrets are is Unshown; NONE says of those that are none."""
    shown, seen = [], 0
    for path in [*ROOT.glob("gateway/**/*.py"), *ROOT.glob("protocol/**/*.py"), *ROOT.glob("gpu_backend/**/*.py")]:
        owner, bases = "", ""
        for match in FIELD.finditer(path.read_text()):
            if match[1]:
                owner, bases = match[1], match[2] or ""
            elif ("Struct" in bases or "Unshown" in bases) and SECRET.search(match[3]):
                seen += 1
                shown += [f"{owner}.{match[3]}"] * ("Unshown" not in bases and f"{owner}.{match[3]}" not in NONE)

    assert shown == [] and seen > 25


def test_what_is_unshown_has_the_rest_in_its_repr() -> None:
    """What is no secret still helps who reads it."""
    nothing: list[Any] = [None] * 4
    keys: KeyLookup[str] = KeyLookup(nothing[0], "pepper-1", ("pepper-2",), *nothing[1:])

    assert repr(keys).startswith("KeyLookup(_database=None, _pepper=…, _other_peppers=…, _find=None, ")
    assert repr(read_url("https://hooks.example/services/T1/B2?token=abc")) == "CallbackUrl(https://hooks.example/…)"
    assert repr(Credentials("AKIA1", "abc")) == "Credentials(access_key=…, secret_key=…, token=None)"
