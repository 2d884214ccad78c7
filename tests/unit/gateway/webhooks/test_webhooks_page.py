# The example of docs/webhooks.md runs as it stands there, on an event as we send it.

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from openai import InvalidWebhookSignatureError

from gateway.outbox.signing import Event, shown_secret, signed_headers
from tests.support.clock import SetClock

PAGE = (Path(__file__).parents[4] / "docs" / "webhooks.md").read_text()


def test_the_example_verifies_an_event(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is ours is printed; what is not raises as the page says."""
    monkeypatch.setenv("TOLLGATE_WEBHOOK_SECRET", shown_secret(b"s" * 32))
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    event = Event.now(SetClock(time.time()), "budget.threshold_reached", {"team_id": "search", "threshold": 80})
    headers = signed_headers(event.id, event.body(), [b"s" * 32], time.time())

    names["receive"](event.body(), headers)  # type: ignore[operator]

    assert event.id in capsys.readouterr().out
    with pytest.raises(InvalidWebhookSignatureError):
        names["receive"](event.body() + b" ", headers)  # type: ignore[operator]
