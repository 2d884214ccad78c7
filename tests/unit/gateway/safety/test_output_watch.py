# An answer passes in windows: whatever its pieces are, nothing short is out before it was seen whole.

from __future__ import annotations

import random

import pytest

from gateway.safety.output_watch import STEP, WINDOW, _Choice
from protocol.chat import FinishReason
from protocol.events import Delta, ToolCallDelta


def deltas_of(text: str, dice: random.Random, most: int) -> list[Delta]:
    """Cut a text into deltas of up to ``most`` characters, of every kind; the last one says the end."""
    deltas = []
    while text:
        size = dice.randint(0, most)
        piece, text = text[:size], text[size:]
        match dice.randrange(3):
            case 0:
                deltas.append(Delta(reasoning=piece))
            case 1:
                deltas.append(Delta(tool_calls=(ToolCallDelta(0, piece),)))
            case _:
                deltas.append(Delta(text=piece))
    return [*deltas, Delta(finish_reason=FinishReason.STOP)]


def said_by(delta: Delta) -> str:
    return delta.reasoning + delta.text + "".join(call.arguments for call in delta.tool_calls)


@pytest.mark.parametrize("most", [1, 7, 60, 450, 3000])
@pytest.mark.parametrize("length", [0, 1, STEP - 1, STEP, STEP + 1, WINDOW, 1777])
def test_every_passage_is_seen_whole_before_its_first_character_is_out(length: int, most: int) -> None:
    """Passages of up to what two windows share, at every place; and all that came goes out, in order."""
    dice = random.Random(length * most)
    text = "".join(chr(0x4E00 + place) for place in range(length))  # each character once
    choice, out, windows = _Choice(), "", list[tuple[int, int]]()
    for delta in deltas_of(text, dice, most):
        is_end = delta.finish_reason is not None
        choice.take(delta)
        for window in choice.full_windows(is_end=is_end):
            assert window in text and len(window) <= WINDOW
            windows.append((text.index(window), text.index(window) + len(window)))
        for start in range(len(out), len(out := out + "".join(map(said_by, choice.release(everything=is_end))))):
            end = min(length, start + WINDOW - STEP)
            assert any(first <= start and end <= last for first, last in windows), (start, windows)

    assert out == text
