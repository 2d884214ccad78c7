# Betas of a header are those of each request in a batch of messages, whatever its body looks like.

from __future__ import annotations

import json

import pytest
from msgspec import Raw

from gateway.batch.message_batches import NewMessageBatch, new_batch


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"model": "m"}', ["a", "b"]),
        ("{ }", ["a", "b"]),
        ('{"model": "m", "anthropic_beta": ["c"]}', ["c"]),
    ],
)
def test_betas_of_a_header_join_each_body(body: str, named: list[str]) -> None:
    """Unless it names its own."""
    said = Raw(f'{{"custom_id": "x", "params": {body}}}'.encode())
    (request,) = new_batch(NewMessageBatch([said]), "a, b").requests

    assert json.loads(bytes(request))["params"]["anthropic_beta"] == named


@pytest.mark.parametrize("said", [b"3", b'{"params": 3}', b'{"custom_id": "x"}', b'{"params": {"a": 1'])
def test_what_makes_no_sense_is_left_to_who_checks_it(said: bytes) -> None:
    """It is refused there, with its place."""
    assert new_batch(NewMessageBatch([Raw(said)]), "a").requests == [Raw(said)]
