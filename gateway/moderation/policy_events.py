# What the checks found, on its way to the audit log: written behind the calls, and never with a text.

from __future__ import annotations

from typing import Any

from gateway.calls.call import Call
from gateway.storage.database import Database
from gateway.storage.rows_behind import RowsBehind
from gateway.storage.tables import audit_log

ACTOR = "system"


class PolicyEvents(RowsBehind):
    """The events of one process that are not in Postgres yet."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, audit_log, "safety_events")

    def note(self, call: Call, action: str, scores: dict[str, float]) -> None:
        """Put down what was found in a call: names and scores."""
        details: dict[str, Any] = {"findings": scores, "model": call.request.model, "endpoint": call.endpoint}
        if call.is_internal:  # not a thing that the key tried
            details["is_aside"] = True
        who = {"actor": ACTOR, "team_id": call.caller.team.id, "subject": call.caller.key_id}
        self.add({"action": action, "request_id": call.request_id, "details": details, **who})
