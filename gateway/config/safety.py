# The section `safety` of tollgate.yaml: what the content policy does where.

from __future__ import annotations

from gateway.config.fields import Faults, complain
from gateway.config.readers import duration, integer, list_of, one_of, secret, struct_of, switch, text, url
from gateway.config.tree import Node
from gateway.core.settings import AbuseSettings, CheckerSettings, Level, Safety
from gateway.moderation.classifier.plain import visible
from gateway.moderation.rules.policy import NAMES

_LEVEL = one_of("block", "flag", "off")
_ABUSE = struct_of(AbuseSettings, {"blocks": integer(0), "window": duration, "pause": duration})
_CHECKER = struct_of(
    CheckerSettings,
    {
        "url": url(("https", "http"), "https://checker.example.com/v1/moderations"),
        "api_key": secret,
        "deadline": duration,
        "on_failure": one_of("allow", "block"),
    },
    needed=("url",),
)


def _phrase(node: Node, faults: Faults) -> str | None:
    """Read a phrase, in lower case with single spaces."""
    phrase = text(node, faults)
    if phrase is not None and not visible(phrase).strip():  # it would stand in every text
        return complain(node, faults, "expected a phrase, found invisible characters alone")
    return None if phrase is None else " ".join(phrase.casefold().split())


read_safety = struct_of(
    Safety,
    {
        "input": _LEVEL,
        "output": _LEVEL,
        "levels": struct_of(dict[str, Level], dict.fromkeys(NAMES, _LEVEL)),
        "deny": list_of(_phrase, what="phrases"),
        "teams_may_loosen": switch,
        "abuse": _ABUSE,
        "checker": _CHECKER,
    },
)
