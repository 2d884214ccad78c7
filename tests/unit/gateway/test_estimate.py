# What a reply probably used when its upstream does not say.

from __future__ import annotations

import pytest

from gateway.answering.estimate import tokens_of
from protocol.events import Delta, ToolCallDelta


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        (Delta(), 0),
        (Delta(text="a"), 1),
        (Delta(text=" traveller"), 1),
        (Delta(text="x" * 10_000), 2_500),
        (Delta(text="x" * 10_000, token_ids=(1, 2, 3)), 3),
        (Delta(reasoning="why " * 100), 100),
        (Delta(tool_calls=(ToolCallDelta(0, "{" + "1" * 399),)), 100),
    ],
)
def test_a_delta_stands_for_its_tokens(delta: Delta, tokens: int) -> None:
    """Named tokens count exactly, a small piece is one token, a large one counts by its bytes: nothing is read free."""
    assert tokens_of(delta) == tokens
