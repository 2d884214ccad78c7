# Drafts from a reply's own text.

from __future__ import annotations

from array import array

import pytest

from gpu_backend.speculation.prompt_lookup import WINDOW, find_drafts


def text(*tokens: int) -> bytearray:
    """Return tokens as prompt lookup reads them."""
    return bytearray(array("i", tokens).tobytes())


def test_what_followed_the_same_three_tokens_is_drafted() -> None:
    """Prompt lookup: the continuation of an earlier place with the same ending."""
    assert find_drafts(text(7, 1, 2, 3, 4, 5, 6, 9, 1, 2, 3), 3) == (4, 5, 6)


def test_the_longest_match_wins_and_of_equal_ones_the_last() -> None:
    """More common context says more; the newer of two equal places is the likelier."""
    assert find_drafts(text(8, 1, 2, 3, 4, 0, 9, 1, 2, 3, 5, 0, 8, 1, 2, 3), 1) == (4,)
    assert find_drafts(text(1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 0, 1, 2, 3), 1) == (5,)


def test_a_repetition_goes_on() -> None:
    """A match that reaches the text's end stands for a cycle."""
    assert find_drafts(text(1, 2, 3, 1, 2, 3), 5) == (1, 2, 3, 1, 2)
    assert find_drafts(text(4, 4, 4, 4), 3) == (4, 4, 4)


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2, 3), (1, 2, 3, 4, 5, 6), (2, 3, 9, 2, 3)])
def test_without_a_match_nothing_is_drafted(tokens: tuple[int, ...]) -> None:
    """Two tokens in common are none."""
    assert find_drafts(text(*tokens), 4) == ()


def test_a_match_begins_at_a_token() -> None:
    """Bytes that look alike across two tokens are no match."""
    across = text(0x0100, 0x0100, 0x0100, 0x0100, 5, 1, 1, 1)

    assert find_drafts(across, 2) == ()


def test_only_the_end_of_a_long_text_is_searched() -> None:
    """The work is bounded: what lies further back than the window is not found."""
    near, far = (text(1, 2, 3, 4, *range(10, 10 + gap), 1, 2, 3) for gap in (WINDOW // 4 - 7, WINDOW // 4))

    assert find_drafts(near, 1) == (4,)
    assert find_drafts(far, 1) == ()
