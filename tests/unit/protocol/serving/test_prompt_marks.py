# Marks of a prompt's beginnings: equal beginnings of one owner have equal marks, and nothing else has.

from __future__ import annotations

import pytest

from protocol.serving.prompt_marks import LENGTHS, MOST, MarkedPrompt, marks_of, tokens_of_marks

TEXT = b"".join(b"%d gates stand on the long road. " % number for number in range(2000))


def test_prompts_that_begin_alike_share_marks_up_to_where_they_part() -> None:
    """However they go on; a mark ends where its beginning does, at lengths that all prompts have in common."""
    whole = marks_of(TEXT, "red team")
    parted = marks_of(TEXT[:5000] + b"!" + TEXT[5000:], "red team")
    shared = sum(length <= 5000 for length in LENGTHS)

    assert whole[:shared] == parted[:shared]
    assert not set(whole[shared:]) & set(parted[shared:])
    assert len(whole) == len(set(whole)) == sum(length <= len(TEXT) for length in LENGTHS)
    assert marks_of(TEXT[:4000], "red team") == whole[: sum(length <= 4000 for length in LENGTHS)]


def test_no_mark_is_anothers() -> None:
    """Two owners have none in common, long names that begin alike included."""
    owners = ["red", "blue", "", "x" * 64 + "a", "x" * 64 + "b"]

    assert len({mark for owner in owners for mark in marks_of(TEXT[:4096], owner)}) == len(owners) * 8


def test_a_short_prompt_has_none_and_a_long_one_not_many() -> None:
    """A beginning of less than 512 bytes is not worth a way; the longest are far apart."""
    assert marks_of(TEXT[:511], "red team") == ()
    assert len(marks_of(bytes(4 * 2**20), "red team")) == MOST


def test_the_engine_hears_how_many_tokens_each_begins_with() -> None:
    """In proportion to the bytes: a hint, by which a mark is tied to a block."""
    marked = MarkedPrompt(2048, marks_of(TEXT[:2048], "red team"))

    assert tokens_of_marks(marked.header(), 400) == tuple(zip(marked.marks, (100, 200, 300, 400), strict=True))


@pytest.mark.parametrize(
    "header", ["", "x", "4096", "4096:", ":", "9:AAAAAAAAAAA=", "-1:AAAAAAAAAAA=", "4096:AAAA", "4096:é"]
)
def test_what_is_no_header_says_nothing(header: str) -> None:
    """A caller that makes one up, or a gateway of another release, gets its answer all the same."""
    assert tokens_of_marks(header, 100) == ()
