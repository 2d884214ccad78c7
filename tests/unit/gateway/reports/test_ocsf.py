# Entries of the audit log as events of OCSF: the class and activity of each, and nothing lost.

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.reports.ocsf import ocsf_event
from gateway.storage.audit_log import AuditEntry

MOMENT = datetime(2026, 11, 23, 12, tzinfo=UTC)


def entry(action: str, **more: str | None) -> AuditEntry:
    facts = {"actor": "admin:adm_1", "team_id": "a", "subject": "key_1", "request_id": "r", "address": "10.0.0.1"}
    facts |= {"reason": None} | more
    return AuditEntry(id=7, created_at=MOMENT, action=action, details={"name": "x"}, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("action", "category", "kind", "activity"),
    [
        ("key.created", 6, 6003, 1),
        ("key.updated", 6, 6003, 3),
        ("key.rotated", 6, 6003, 3),
        ("admin_key.revoked", 6, 6003, 4),
        ("batch.cancelled", 6, 6003, 4),
        ("callback.redelivered", 6, 6003, 99),
        ("session.began", 3, 3002, 1),
        ("safety.input_blocked", 2, 2004, 1),
    ],
)
def test_each_action_has_its_class(action: str, category: int, kind: int, activity: int) -> None:
    event = ocsf_event(entry(action))

    assert (event["category_uid"], event["class_uid"], event["activity_id"]) == (category, kind, activity)
    assert event["type_uid"] == kind * 100 + activity and event["metadata"]["uid"] == "7"
    assert event["time"] == MOMENT.timestamp() * 1000 and event["unmapped"]["details"] == {"name": "x"}


def test_who_from_where_and_why_are_told() -> None:
    event = ocsf_event(entry("key.revoked", reason="leaked"))
    silent = ocsf_event(entry("key.revoked", address=None))

    assert event["actor"]["user"]["uid"] == "admin:adm_1" and event["src_endpoint"] == {"ip": "10.0.0.1"}
    assert event["message"] == "key.revoked: leaked" and event["api"]["request"]["uid"] == "r"
    assert event["resources"] == [{"uid": "key_1", "type": "key"}]
    assert "src_endpoint" not in silent and silent["message"] == "key.revoked"
