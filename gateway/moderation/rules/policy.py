# What the content policy makes of a finding: blocked, flagged, or nothing. Values in, values out.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

from msgspec import Struct

from gateway.core.settings import FindingLevel, Level, Redacts, Safety, TeamSafety
from gateway.moderation.classifier.findings import GROUPS, Finding

Stage = Literal["input", "output"]
STAGES: tuple[Stage, ...] = ("input", "output")

STRICTNESS: dict[FindingLevel, int] = {"off": 0, "flag": 1, "redact": 2, "block": 3}
REDACTABLE = ("secrets", "personal_data", "contacts")  # groups whose finds have a place in their text
CATEGORIES = (
    *("attack", "harm", "harassment", "harassment/threatening", "hate", "hate/threatening", "illicit"),
    *("illicit/violent", "self-harm", "self-harm/intent", "self-harm/instructions", "sexual", "sexual/minors"),
    *("violence", "violence/graphic"),
)
NAMES = (*GROUPS, *CATEGORIES)

# What is flagged at the most unless the configuration says otherwise: an address in a prompt is everyday business, and
# a user who speaks of self-harm needs an answer.
ONLY_FLAGGED = frozenset({"contacts", "self-harm", "self-harm/intent", "self-harm/instructions"})


class Policy(Struct, frozen=True):
    """What holds for one team. ``own``: its own levels, which may not go below ``floor``, where there is one."""

    input: Level = "off"
    output: Level = "off"
    levels: Mapping[str, FindingLevel] = {}
    own: Mapping[str, FindingLevel] = {}
    floor: Policy | None = None
    redacts: Redacts = "input"

    def level(self, stage: Stage, finding: Finding) -> FindingLevel:
        """Return what ``finding`` meets."""
        usual = self.input if stage == "input" else self.output
        if usual == "off":
            return "off"
        own = _said(self.own, finding)
        level = self._there(stage, _said(self.levels, finding) if own is None else own)
        if level is None:
            level = "flag" if finding.group in ONLY_FLAGGED or finding.name in ONLY_FLAGGED else usual
        return level if self.floor is None else _stricter(level, self.floor.level(stage, finding))

    def _there(self, stage: Stage, level: FindingLevel | None) -> FindingLevel | None:
        """Return a level that was said as it holds at a stage. Where nothing is redacted, what is in an answer is
        blocked, and a request is as if nothing had been said."""
        if level != "redact" or self.redacts in ("both", stage):
            return level
        return "block" if stage == "output" else None

    def may_block(self, stage: Stage) -> bool:
        """Whether anything that can be found in a request, or in an answer, is blocked. Ways to reach a person are not
        looked for in answers."""
        usual = self.input if stage == "input" else self.output
        if usual != "flag":
            return usual == "block"
        said = {*self.levels, *self.own} - ({"contacts"} if stage == "output" else set())
        return any(self.level(stage, Finding(name, name)) in ("block", "redact") for name in said)

    def redacted_groups(self, stage: Stage) -> frozenset[str]:
        """Return the groups whose finds are taken out of requests, or of answers."""
        if "redact" not in self.levels.values() and "redact" not in self.own.values():
            return frozenset()
        return frozenset(group for group in REDACTABLE if self.level(stage, Finding(group, group)) == "redact")

    def blocked_and_flagged(self, stage: Stage, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Return the findings that are blocked, and those that are flagged. What is to be redacted and is still found
        (hidden in another code, cut in two) is blocked."""
        blocked: list[Finding] = []
        flagged: list[Finding] = []
        for finding in findings:
            match self.level(stage, finding):
                case "block" | "redact":
                    blocked.append(finding)
                case "flag":
                    flagged.append(finding)
        return blocked, flagged


def policy_of(deployment: Safety, team: TeamSafety | None) -> Policy:
    """Return what holds for a team: the stricter of its levels and the deployment's, or its own where that is
    allowed."""
    own = team or TeamSafety()
    return Policy(
        _joined(deployment.input, own.input, deployment.teams_may_loosen),
        _joined(deployment.output, own.output, deployment.teams_may_loosen),
        deployment.levels,
        own.levels,
        None if deployment.teams_may_loosen else _floor(deployment),
        own.redacts or deployment.redacts,
    )


def _floor(deployment: Safety) -> Policy:
    return Policy(deployment.input, deployment.output, deployment.levels, redacts=deployment.redacts)


def loosens(team: TeamSafety, deployment: Safety) -> tuple[str, FindingLevel] | None:
    """Return which of a team's levels is looser than the deployment allows, and what the deployment has; None where
    none is."""
    if deployment.teams_may_loosen:
        return None
    for stage in STAGES:
        own, least = getattr(team, stage), getattr(deployment, stage)
        if own is not None and _stricter(own, least) != own:
            return stage, least
    floor = _floor(deployment)
    said = Policy(floor.input, floor.output, own=team.levels, redacts=team.redacts or floor.redacts)
    for name in team.levels:
        for stage in STAGES:
            level, least = said.level(stage, Finding(name, name)), floor.level(stage, Finding(name, name))
            if _stricter(level, least) != level:
                return f"levels.{name}", least
    return None


def _joined(deployment: Level, own: Level | None, may_loosen: bool) -> Level:
    if own is None:
        return deployment
    return own if may_loosen else _stricter(deployment, own)


L = TypeVar("L", Level, FindingLevel)


def _stricter(one: L, other: L) -> L:
    return max(one, other, key=STRICTNESS.__getitem__)


def _said(levels: Mapping[str, FindingLevel], finding: Finding) -> FindingLevel | None:
    own = levels.get(finding.name)
    return levels.get(finding.group) if own is None else own
