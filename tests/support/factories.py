# Facts for tests that care about one or two of their fields.

from __future__ import annotations

from typing import Any

from billing.core.records import Status, UsageRecord


def make_record(request_id: str, **fields: Any) -> UsageRecord:
    """Return the record of an answered call."""
    usual: dict[str, Any] = {
        "team_id": "team_a",
        "key_id": "key_a",
        "endpoint": "chat.completions",
        "model_asked": "auto",
        "model_used": "gpt-4o",
        "provider": "openai",
        "provider_endpoint": "us https://api.openai.com/v1",
        "status": Status.ANSWERED,
        "input_tokens": 100,
        "cached_input_tokens": 40,
        "output_tokens": 20,
        "cost_nanousd": 400_000,
        "total_ms": 12.5,
        "route_reason": "named",
    }
    return UsageRecord(request_id=request_id, **(usual | fields))
