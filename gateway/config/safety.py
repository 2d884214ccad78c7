# The section `safety` of tollgate.yaml: what the content policy does where.

from __future__ import annotations

from gateway.config.fields import Faults, Fields, complain
from gateway.config.readers import duration, integer, list_of, one_of, secret, struct_of, switch, text, url
from gateway.config.tree import Node
from gateway.safety.plain import visible
from gateway.safety.policy import NAMES
from gateway.settings import AbuseSettings, CheckerSettings, Level, Safety

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


def read_safety(node: Node, faults: Faults) -> Safety | None:
    """Read the section; ``None`` if it is faulty."""
    before = len(faults)
    fields = Fields(node, node.path, faults)
    house = Safety(
        input=fields.get("input", _LEVEL, "off"),
        output=fields.get("output", _LEVEL, "off"),
        levels=fields.get("levels", _read_levels, {}),
        deny=fields.get("deny", _read_phrases, ()),
        teams_may_loosen=fields.get("teams_may_loosen", switch, False),
        abuse=fields.get("abuse", _ABUSE, AbuseSettings()),
        checker=fields.find("checker", _CHECKER),
    )
    fields.close()
    return house if len(faults) == before else None


def _read_levels(node: Node, faults: Faults) -> dict[str, Level] | None:
    fields = Fields(node, node.path, faults)
    found = {name: level for name in NAMES if (level := fields.find(name, _LEVEL)) is not None}
    fields.close()
    return found


def _read_phrase(node: Node, faults: Faults) -> str | None:
    phrase = text(node, faults)
    if phrase is not None and not visible(phrase).strip():  # it would stand in every text
        return complain(node, faults, "expected a phrase, found signs that nobody sees")
    return phrase


def _read_phrases(node: Node, faults: Faults) -> tuple[str, ...] | None:
    phrases = list_of(_read_phrase, what="phrases")(node, faults)
    return None if phrases is None else tuple(" ".join(phrase.casefold().split()) for phrase in phrases)
