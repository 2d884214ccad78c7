# What the next turn takes from a stored one.

from __future__ import annotations

import msgspec
from msgspec import Raw

from gateway.stored_responses.turns import Turn


def test_a_status_that_is_not_known_goes_back_as_it_came() -> None:
    """Upstreams add some; nothing here goes by it."""
    said = {"id": "ci_1", "type": "code_interpreter_call", "code": "1", "container_id": "c", "outputs": None}
    response = {"output": [said | {"status": "queued"}, said | {"status": "completed"}]}
    items = Turn((), Raw(msgspec.json.encode(response))).output()

    assert [(item.status, item.code) for item in items] == [("queued", "1"), ("completed", "1")]
