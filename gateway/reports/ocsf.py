# Entries of the audit log in the words of the Open Cybersecurity Schema Framework (schema.ocsf.io, 1.4), as collectors
# of security events read them: what admins did is API Activity, a sign-in Authentication, a safety check's find a
# Detection Finding.

from __future__ import annotations

from typing import Any

from gateway.accounts.serializers import in_dollars
from gateway.core.version import VERSION
from gateway.storage.audit_log import AuditEntry

SCHEMA = "1.4.0"
PRODUCT = {"name": "Tollgate", "vendor_name": "Tollgate", "version": VERSION}
API_ACTIVITY, AUTHENTICATION, FINDING = 6003, 3002, 2004
CREATE, READ, UPDATE, DELETE, OTHER = 1, 2, 3, 4, 99  # activities of API Activity
LOGON, LOGOFF = 1, 2  # of Authentication
INFORMATIONAL, MEDIUM = 1, 3  # severities
ACTIVITIES = {
    **dict.fromkeys(("created", "booked", "issued"), CREATE),
    **dict.fromkeys(("updated", "rotated", "suspended", "resumed", "opened", "reset", "healed"), UPDATE),
    **dict.fromkeys(("deleted", "revoked", "cancelled", "retired"), DELETE),
}
SESSIONS = {"session.began": LOGON, "session.ended": LOGOFF}


def ocsf_event(entry: AuditEntry) -> dict[str, Any]:
    """Return one entry as an event. What the schema has no field for stands in ``unmapped``."""
    moment = int(entry.created_at.timestamp() * 1000)
    user = {"name": entry.actor, "uid": entry.actor}
    event: dict[str, Any] = {
        "time": moment,
        "metadata": {"version": SCHEMA, "product": PRODUCT, "log_name": "audit_log", "uid": str(entry.id)},
        "severity_id": INFORMATIONAL,
        "status_id": 1,  # success: what failed was rolled back with its entry
        "actor": {"user": user},
        "message": entry.action if entry.reason is None else f"{entry.action}: {entry.reason}",
        "unmapped": {"action": entry.action, "team_id": entry.team_id, "details": in_dollars(entry.details)},
    }
    if entry.address is not None:
        event["src_endpoint"] = {"ip": entry.address}
    if entry.action in SESSIONS:
        return _classed(event, 3, AUTHENTICATION, SESSIONS[entry.action]) | {"user": user}
    if entry.action.startswith("safety."):
        found = {"uid": f"{entry.id}", "title": entry.action}
        return _classed(event, 2, FINDING, CREATE) | {"finding_info": found, "severity_id": MEDIUM}
    _, _, verb = entry.action.rpartition(".")
    activity = next((number for word, number in ACTIVITIES.items() if verb.endswith(word)), OTHER)
    event["api"] = {"operation": entry.action, "request": {"uid": entry.request_id or ""}}
    event["resources"] = [{"uid": entry.subject or "", "type": entry.action.partition(".")[0]}]
    return _classed(event, 6, API_ACTIVITY, activity)


def _classed(event: dict[str, Any], category: int, kind: int, activity: int) -> dict[str, Any]:
    named = {"category_uid": category, "class_uid": kind, "activity_id": activity, "type_uid": kind * 100 + activity}
    return event | named
