# Words, their hashes and the runs of bytes in them, all found at once, are those that would be found one by one.

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np
import pytest

from gateway.moderation.classifier.classifier import HEADS, PLACES, Classifier
from gateway.moderation.classifier.features import NO_RUN, RUNS, each_once, hashes_of, joined, read_runs, words_of

WORD = re.compile(rb"[a-z\x80-\xff]{1,40}|[0-9]{1,40}|[^\sa-z0-9\x80-\xff]")
SIGNS = [*map(chr, range(128)), *"the cat sat on 1234 mats.\n\t", "\x85", "é", "中", "🙂", "\ud800"]
TEXTS = ["", " ", "a", "...", "x" * 95 + " " + "é" * 50 + "1" * 41, "one. Two, three", "中" * 14, "  spaced\n\n out "]


def odd_texts() -> list[str]:
    dice = random.Random(5)
    return [text.lower() for text in TEXTS] + ["".join(dice.choices(SIGNS, k=dice.randint(1, 300))) for _ in range(200)]


def test_words_are_those_of_their_pattern() -> None:
    """In order, whatever stands between, and cut where they are too long."""
    for text in map(str.lower, odd_texts()):
        assert words_of(text).said() == WORD.findall(text.encode("utf-8", "replace")), text


def test_a_word_counts_as_the_same_wherever_it_stands() -> None:
    """Alone or in a text; and no two words have a key in common here."""
    for text in map(str.lower, odd_texts()):
        words = words_of(text)
        said = words.said()

        for word, key in zip(said[:5], words.keys.tolist(), strict=False):
            assert [some.keys.tolist() for some in joined([word])] == [[key]]
        assert len(set(said)) == len(set(words.keys.tolist()))


def test_different_words_are_counted() -> None:
    """Each once, by where it stands."""
    for text in map(str.lower, odd_texts()):
        words = words_of(text)
        said = words.said()
        places, counts, which = each_once(words.keys)

        assert [said[place] for place in places.take(which)] == said
        assert Counter(said) == {said[place]: count for place, count in zip(places, counts, strict=True)}


def test_runs_of_a_word_have_no_space_inside() -> None:
    """Two to five bytes of the word with a space on either side, and the word itself; the same beside any neighbour."""
    for said in ([b"a"], [b"ab", b"c"], [b"abcdefgh", b"!", b"\xff\xfe", b"0123"]):
        (words,) = joined(said)
        runs = read_runs(words, hashes_of(said))
        ends = [*runs.starts[1:], runs.buckets.shape[1]]
        for word, start, end in zip(said, runs.starts, ends, strict=True):
            (alone,) = joined([word])
            spaced = b" %b " % word
            expected = sum(max(0, len(spaced) - size + 1) for size in RUNS) + 1

            found = runs.buckets[:, start:end]
            assert (found != NO_RUN).sum() == expected
            assert sorted(found[found != NO_RUN].tolist()) == sorted(
                bucket for bucket in read_runs(alone, hashes_of([word])).buckets.ravel().tolist() if bucket != NO_RUN
            )


@pytest.fixture(scope="module")
def shipped() -> Classifier:
    return Classifier.load()


def test_what_is_remembered_changes_no_score(shipped: Classifier) -> None:
    """Words that are new, or known, or have lost their place since: in one text of three, two have the same."""
    dice = random.Random(3)
    texts = [" ".join("".join(dice.choices("abcdefghij", k=5)) for _ in range(300)) for _ in range(PLACES // 1000)]
    before = [shipped.logits(text, fully=True) for text in texts]
    again = [shipped.logits(text, fully=True) for text in texts]
    other = Classifier.load()

    assert np.array(again) == pytest.approx(np.array(before), abs=1e-5)
    assert other.logits(texts[-1], fully=True) == pytest.approx(before[-1], abs=1e-5)


@pytest.mark.parametrize("text", ["i will kill you, you idiot", "how do i bake bread?", "have sex with me now", ""])
def test_kinds_are_asked_for_where_there_is_something(shipped: Classifier, text: str) -> None:
    """A policy hears of the same findings as whoever asks for every score."""
    quick, full = shipped.logits(text), shipped.logits(text, fully=True)

    assert quick[:3] == pytest.approx(full[:3])
    assert ((quick > 0) == (full > 0)).all() and (full[3:] <= quick[3:]).all()
    assert full[HEADS.index("any")] == np.max(full[3:])
