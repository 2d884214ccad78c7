# What the policy makes of findings, and of teams that want another one.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.core.settings import Level, Safety, TeamSafety
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.rules.policy import STAGES, Policy, loosens, policy_of

SECRET, EMAIL = Finding("aws_key", "secrets"), Finding("email", "contacts")


@pytest.mark.parametrize(
    ("house", "team", "may_loosen", "holds"),
    [
        ("off", None, False, "off"),
        ("off", "flag", False, "flag"),
        ("block", "off", False, "block"),
        ("flag", "block", False, "block"),
        ("block", "off", True, "off"),
        ("block", None, True, "block"),
    ],
)
def test_the_stricter_level_holds_unless_the_house_lets_teams_loosen(
    house: Level, team: Level | None, may_loosen: bool, holds: Level
) -> None:
    """For input as for output."""
    policy = policy_of(
        Safety(input=house, output=house, teams_may_loosen=may_loosen), TeamSafety(input=team, output=team)
    )

    assert (policy.input, policy.output) == (holds, holds)


def test_a_team_that_loosens_is_told_where() -> None:
    """What it leaves out is the house's."""
    house = Safety(input="flag", output="block")

    assert loosens(TeamSafety(), house) is None
    assert loosens(TeamSafety(input="block"), house) is None
    assert loosens(TeamSafety(output="flag"), house) == ("output", "block")
    assert loosens(TeamSafety(levels={"secrets": "block", "contacts": "block"}), house) is None
    assert loosens(TeamSafety(levels={"secrets": "flag"}), house) == ("levels.secrets", "block")
    assert loosens(TeamSafety(input="off"), Safety(input="block", teams_may_loosen=True)) is None


def test_a_group_or_a_category_may_have_a_level_of_its_own() -> None:
    """In place of the stage's, but not where the stage is off; an address is flagged at the most by default."""
    assert Policy("block").blocked_and_flagged("input", [SECRET, EMAIL]) == ([SECRET], [EMAIL])
    assert Policy("block", levels={"contacts": "block", "secrets": "off"}).blocked_and_flagged(
        "input", [SECRET, EMAIL]
    ) == (
        [EMAIL],
        [],
    )
    assert Policy("flag", levels={"secrets": "block"}).blocked_and_flagged("input", [SECRET]) == ([SECRET], [])
    assert Policy("off", "block", {"secrets": "block"}).blocked_and_flagged("input", [SECRET]) == ([], [])


@pytest.mark.parametrize(
    ("house", "team", "asked", "answered"),
    [
        (Safety(redacts="input"), None, "redact", "block"),
        (Safety(redacts="output"), None, "block", "redact"),
        (Safety(redacts="both"), None, "redact", "redact"),
        (Safety(redacts="input"), TeamSafety(redacts="output"), "block", "block"),
        (Safety(redacts="input", teams_may_loosen=True), TeamSafety(redacts="output"), "block", "redact"),
        (Safety(redacts="output"), TeamSafety(redacts="both", levels={"secrets": "redact"}), "block", "redact"),
    ],
)
def test_what_is_redacted_on_one_side_is_not_loosened_on_the_other(
    house: Safety, team: TeamSafety | None, asked: str, answered: str
) -> None:
    """What stands in an answer then is blocked; a request is as if nothing had been said. A team may not take away what
    the house redacts."""
    policy = policy_of(replace(house, input="block", output="block", levels={"secrets": "redact"}), team)
    groups = [policy.redacted_groups(stage) for stage in STAGES]

    assert (policy.level("input", SECRET), policy.level("output", SECRET)) == (asked, answered)
    assert groups == [{"secrets"} if level == "redact" else set() for level in (asked, answered)]


def test_a_team_may_redact_where_the_house_flags() -> None:
    """On either side; what the house blocks it may not."""
    flags = Safety(input="flag", output="flag")

    assert loosens(TeamSafety(levels={"secrets": "redact"}, redacts="output"), flags) is None
    assert loosens(TeamSafety(levels={"secrets": "redact"}), replace(flags, output="block")) is None
    blocked = loosens(TeamSafety(levels={"secrets": "redact"}, redacts="both"), replace(flags, output="block"))
    assert blocked == ("levels.secrets", "block")


@pytest.mark.parametrize(
    ("house", "team", "secret", "email"),
    [
        (Safety(input="flag"), TeamSafety(levels={"contacts": "block"}), "flag", "block"),
        (Safety(input="flag"), TeamSafety(input="block", levels={"secrets": "flag"}), "flag", "flag"),
        (Safety(input="block"), TeamSafety(levels={"secrets": "off", "email": "block"}), "block", "block"),
        (Safety(input="block", teams_may_loosen=True), TeamSafety(levels={"secrets": "off"}), "off", "flag"),
        (Safety(input="off"), TeamSafety(levels={"secrets": "block"}), "off", "off"),
        (Safety(input="off"), TeamSafety(input="flag", levels={"contacts": "off"}), "flag", "off"),
        (Safety(input="flag", levels={"contacts": "block"}), TeamSafety(input="block"), "block", "block"),
    ],
)
def test_a_team_has_levels_of_its_own_for_groups_and_categories(
    house: Safety, team: TeamSafety, secret: Level, email: Level
) -> None:
    """Where its stage is on, and never below what the house would do, unless that lets it."""
    policy = policy_of(house, team)

    assert (policy.level("input", SECRET), policy.level("input", EMAIL)) == (secret, email)
    assert len({team, TeamSafety(input=team.input, levels=dict(team.levels))}) == 1  # policies are found by it
