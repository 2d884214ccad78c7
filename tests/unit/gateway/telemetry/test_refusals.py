# The log lines of refused calls: what they say, what they never say, and how few a flood leaves.

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from billing.core.errors import RateLimited
from gateway.core.principals import Admin, Caller, Team
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.refusals import ALIKE, AN_HOUR, COUNTED, IN_ALL, Refusals
from gateway.upstreams.wire.errors import UpstreamTimeout
from protocol.errors import BadRequest, InvalidKey, ServiceError
from router.catalog.catalog import Catalog
from tests.support.house import model

CATALOG = Catalog(models={"small": model("small")}, endpoints={}, auto={}, fallbacks={}, aliases={"old": "small"})


def scope(team: str = "a", key: str = "key_1", **state: Any) -> dict[str, Any]:
    """Return what ASGI and the guards know of a request of a team's key."""
    caller = Caller(team=Team(id=team, name=team), key_id=key)
    return {
        "type": "http",
        "path_template": "/v1/chat/completions",
        "client": ("203.0.113.7", 5000),
        "headers": [(b"authorization", b"Bearer tg-12345678secret")],
        "state": {"request_id": "0196", "caller": caller, "model_asked": "small"} | state,
    }


@pytest.fixture
def refusals() -> Refusals:
    """One second's lines."""
    return Refusals(Metrics(), CATALOG)


def lines(refusals: Refusals, *noted: tuple[dict[str, Any], ServiceError]) -> list[Any]:
    """Return what is logged of some refusals, and of the end of their second."""
    with capture_logs() as logs:
        for where, error in noted:
            refusals.note(where, error)
        refusals.turn()
    return logs


def test_a_refusal_says_who_asked_for_what_and_why_not(refusals: Refusals) -> None:
    """Request, team, key, model, endpoint, status, code, and the limit where one refused."""
    error = RateLimited("slow down")
    error.limit = "team.requests_per_minute"

    assert lines(refusals, (scope(), error)) == [
        {
            "event": "call_refused",
            "log_level": "info",
            "request_id": "0196",
            "team": "a",
            "key": "key_1",
            "model": "small",
            "endpoint": "/v1/chat/completions",
            "status": 429,
            "code": "rate_limit_exceeded",
            "limit": "team.requests_per_minute",
        }
    ]


def test_a_failed_upstream_is_no_refusal(refusals: Refusals) -> None:
    """It has a line of its own name, with the word that the call's attempts have."""
    [line] = lines(refusals, (scope(), UpstreamTimeout("silence")))

    assert (line["event"], line["status"], line["code"], line["outcome"]) == (
        "call_failed",
        504,
        "upstream_timeout",
        "timeout",
    )


def test_a_key_that_is_none_is_told_by_its_address_and_beginning(refusals: Refusals) -> None:
    """What lists of keys show, too: a revoked key that is still in use is found by it."""
    [line] = lines(refusals, (scope(caller=None), InvalidKey("no")))
    [others] = lines(
        refusals, (scope(caller=None) | {"headers": [(b"x-api-key", b"sk-another-service")]}, InvalidKey("no"))
    )
    [admin] = lines(refusals, (scope(caller=Admin("f00")), BadRequest("no")))

    assert (line["address"], line["key_prefix"]) == ("203.0.113.7", "tg-12345678")
    assert others["address"] == "203.0.113.7" and "another" not in str(others)
    assert admin["admin"] == "f00" and "team" not in admin


@pytest.mark.parametrize(("asked", "told"), [("old", "old"), ("sk-pasted-secret", "unknown"), (None, None)])
def test_a_model_is_told_where_the_catalogue_has_it(refusals: Refusals, asked: str | None, told: str | None) -> None:
    """A caller may write anything as a model's name; only names of the catalogue are logged."""
    [line] = lines(refusals, (scope(model_asked=asked), BadRequest("what was said")))

    assert line["model"] == told
    assert "said" not in str(line)


def test_a_flood_of_one_kind_is_a_few_lines_and_a_count(refusals: Refusals) -> None:
    """Each second tells the first of each team, key and code, and at its end how many were left out of which."""
    flood = [(scope(), BadRequest("no", code="invalid_value"))] * 1000
    other = (scope(key="key_2"), BadRequest("no", code="invalid_value"))

    first = lines(refusals, *flood, other)
    second = lines(refusals, other)

    assert [line["event"] for line in first] == ["call_refused"] * (ALIKE + 1) + ["refusals_left_out"]
    assert first[-1]["count"] == 1000 - ALIKE
    assert first[-1]["most"] == [{"team": "a", "key": "key_1", "code": "invalid_value", "count": 1000 - ALIKE}]
    assert [line["event"] for line in second] == ["call_refused"]


def test_a_flood_of_many_kinds_is_bounded_too(refusals: Refusals) -> None:
    """However many teams, keys and codes: so many lines a second, and one more."""
    flood = [(scope(f"team{number}"), BadRequest("no")) for number in range(2000)]

    logs = lines(refusals, *flood)

    assert len(logs) == IN_ALL + 1
    assert (logs[-1]["count"], len(logs[-1]["most"])) == (2000 - IN_ALL, COUNTED)


def test_a_team_can_ask_why() -> None:
    """What a limit refused is kept with its words; of what was asked no word is; so many an hour."""
    kept: list[dict[str, Any]] = []
    refusals = Refusals(Metrics(), CATALOG, {"/v1/chat/completions": "chat.completions"}, {"stop"}, kept.append)
    limited = RateLimited("slow down")
    limited.limit = "team.requests_per_minute"
    request_id = "01a207de-81f9-7410-912e-195562435ab1"
    lines(
        refusals,
        (scope(request_id=request_id), limited),
        (
            scope(request_id=request_id, model_asked="a secret"),
            BadRequest("you said: a secret", param="stop[0].secret"),
        ),
        (scope(request_id=request_id), BadRequest("no", param="secret")),
        (scope(request_id=request_id) | {"path_template": "/v1/files"}, limited),
    )

    assert kept[0] == {
        "request_id": UUID(request_id),
        "team_id": "a",
        "key_id": "key_1",
        "endpoint": "chat.completions",
        "model_asked": "small",
        "http_status": 429,
        "code": "rate_limit_exceeded",
        "param": None,
        "limit_name": "team.requests_per_minute",
        "message": "slow down",
    }
    assert [(row["model_asked"], row["param"], row["message"]) for row in kept[1:]] == [
        ("unknown", "stop", None),
        ("small", None, None),
    ]
    for _ in range(200):
        lines(refusals, *[(scope(request_id=request_id), limited)] * 5)
    assert len(kept) == AN_HOUR


def test_one_teams_flood_hides_no_other_teams_refusal() -> None:
    """What is kept for a team depends on no line of the log."""
    kept: list[dict[str, Any]] = []
    refusals = Refusals(Metrics(), CATALOG, {"/v1/chat/completions": "chat.completions"}, (), kept.append)
    request_id = "01a207de-81f9-7410-912e-195562435ab1"
    flood = [(scope(key=f"key_{n}", request_id=request_id), RateLimited("no")) for n in range(IN_ALL)]
    lines(refusals, *flood, *flood, (scope("quiet", "key_q", request_id=request_id), RateLimited("no")))

    assert [row["team_id"] for row in kept].count("quiet") == 1
