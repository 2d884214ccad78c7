# What the content policy makes of a finding: blocked, flagged, or nothing. Values in, values out.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from gateway.safety.findings import GROUPS, Finding
from gateway.settings import Level, Safety, TeamSafety

Stage = Literal["input", "output"]

STRICTNESS: dict[Level, int] = {"off": 0, "flag": 1, "block": 2}
CATEGORIES = (
    *("attack", "harm", "harassment", "harassment/threatening", "hate", "hate/threatening", "illicit"),
    *("illicit/violent", "self-harm", "self-harm/intent", "self-harm/instructions", "sexual", "sexual/minors"),
    *("violence", "violence/graphic"),
)
NAMES = (*GROUPS, *CATEGORIES)

# What is flagged at the most unless the configuration says otherwise: an address in a prompt is everyday business, and
# whoever speaks of harming themselves needs an answer.
ONLY_FLAGGED = frozenset({"contacts", "self-harm", "self-harm/intent", "self-harm/instructions"})


class Policy(Struct, frozen=True):
    """What holds for one team."""

    input: Level = "off"
    output: Level = "off"
    levels: Mapping[str, Level] = {}

    def level(self, stage: Stage, finding: Finding) -> Level:
        """Return what ``finding`` meets."""
        usual = self.input if stage == "input" else self.output
        if usual == "off":
            return "off"
        for name in (finding.name, finding.group):
            if (own := self.levels.get(name)) is not None:
                return own
        return "flag" if finding.group in ONLY_FLAGGED or finding.name in ONLY_FLAGGED else usual

    def verdict(self, stage: Stage, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Return the findings that are blocked, and those that are flagged."""
        blocked: list[Finding] = []
        flagged: list[Finding] = []
        for finding in findings:
            match self.level(stage, finding):
                case "block":
                    blocked.append(finding)
                case "flag":
                    flagged.append(finding)
        return blocked, flagged


def policy_of(house: Safety, team: TeamSafety | None) -> Policy:
    """Return what holds for a team: the stricter of its levels and the house's, or its own where that is allowed."""
    own = team or TeamSafety()
    return Policy(
        _joined(house.input, own.input, house.teams_may_loosen),
        _joined(house.output, own.output, house.teams_may_loosen),
        house.levels,
    )


def loosens(team: TeamSafety, house: Safety) -> Stage | None:
    """Return the stage in which a team's levels are looser than the house allows, if there is one."""
    if house.teams_may_loosen:
        return None
    if team.input is not None and STRICTNESS[team.input] < STRICTNESS[house.input]:
        return "input"
    if team.output is not None and STRICTNESS[team.output] < STRICTNESS[house.output]:
        return "output"
    return None


def _joined(house: Level, own: Level | None, may_loosen: bool) -> Level:
    if own is None:
        return house
    return own if may_loosen else max(house, own, key=STRICTNESS.__getitem__)
