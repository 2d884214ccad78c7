# What is signed verifies with the stock client, and nothing else does.

from __future__ import annotations

import base64
import json
import time
from decimal import Decimal

import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from gateway.outbox.signing import Event, shown_secret, signed_headers
from tests.support.clock import SetClock

OLD, NEW = b"o" * 32, b"n" * 32


def event() -> Event:
    data = {"id": "batch_1", "used_usd": Decimal("8.10"), "words": "Grüße"}
    return Event.now(SetClock(time.time()), "batch.completed", data)


@pytest.mark.parametrize("secret", [OLD, NEW])
def test_each_valid_secret_verifies(secret: bytes) -> None:
    """While two are valid, a receiver with either one reads the event."""
    sent = event()
    headers = signed_headers(sent.id, sent.body(), [OLD, NEW], time.time())

    with OpenAI(api_key="none", webhook_secret=shown_secret(secret)) as client:
        read = client.webhooks.unwrap(sent.body(), headers)

    assert (read.id, read.object, read.type, read.data.id) == (sent.id, "event", "batch.completed", "batch_1")
    assert read.created_at == int(sent.created_at)


def test_an_event_of_our_own_type_is_read() -> None:
    """The stock client knows no budgets, and gives what it was sent."""
    sent = Event.now(SetClock(time.time()), "budget.threshold_reached", {"team_id": "search", "threshold": 80})
    headers = signed_headers(sent.id, sent.body(), [OLD], time.time())

    with OpenAI(api_key="none", webhook_secret=shown_secret(OLD)) as client:
        read = client.webhooks.unwrap(sent.body(), headers)

    assert read.type == "budget.threshold_reached"
    assert read.to_dict()["data"] == {"team_id": "search", "threshold": 80}


@pytest.mark.parametrize("change", ["secret", "body", "id", "time"])
def test_whatever_is_changed_does_not_verify(change: str) -> None:
    """Another secret, body, id or moment than what was signed is refused."""
    sent = event()
    headers = signed_headers(sent.id, sent.body(), [NEW], time.time() - (400 if change == "time" else 0))
    body = sent.body() + (b" " if change == "body" else b"")
    if change == "id":
        headers["webhook-id"] = "evt_other"

    with OpenAI(api_key="none", webhook_secret=shown_secret(OLD if change == "secret" else NEW)) as client:
        with pytest.raises(InvalidWebhookSignatureError):
            client.webhooks.unwrap(body, headers)


def test_the_published_example_has_our_signature() -> None:
    """The test vector of the Standard Webhooks libraries."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = signed_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', [secret], 1614265330)

    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_money_in_an_event_is_exact() -> None:
    """A number with its own digits, not a float's."""
    whole = json.loads(event().body(), parse_float=Decimal)

    assert whole["data"]["used_usd"] == Decimal("8.10")
    assert whole.keys() == {"id", "object", "type", "created_at", "data"}
