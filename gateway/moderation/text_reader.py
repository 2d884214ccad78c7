# What texts hold, as far as the content policy asks: rules and the classifier read them, in slices with turns for other
# calls between, and both remember what they read, for a conversation comes again with every turn.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gateway.moderation.classifier.classifier import Classifier, Floats, evened, findings_of, readings, scores_of
from gateway.moderation.classifier.features import passages
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.classifier.hidden import hidden
from gateway.moderation.classifier.plain import plain, visible
from gateway.moderation.encoder_reader import Reader
from gateway.moderation.redaction import unmarked
from gateway.moderation.rules.rules import find_by_rules, foldings, holds_phrase
from gateway.moderation.texts import ids_of, is_unreadable, texts_of
from protocol.inference import NativeRequest, Request

if TYPE_CHECKING:
    from gateway.moderation.reading.encoder import Vectors

SLICE = 7_000  # characters that are looked at before others have their turn
OVERLAP = 1_000  # visible characters of a slice that the next one has again; no rule's find is longer
LEAST = 200  # characters that the shortest text counts as: to look at none takes time, too
ENCODED_AT_MOST = 16_000  # characters of one request, its latest texts first; a quarter of a second to a whole one
REMEMBERED = 8192  # texts and windows whose findings are known: a conversation comes again with every turn

UNREADABLE = Finding("token_ids", "unreadable")
PHRASE = Finding("phrase", "deny")


@dataclass(slots=True)
class EncoderShare:
    """How many characters of a request the encoder still reads; words alone judge what is beyond. Its process is
    all requests': no request, however long, keeps it from the others, and no first token waits longer for it."""

    left: int = ENCODED_AT_MOST


class TextReader:
    """Reads the texts of one process, one slice at a time. ``encoder``: what reads the classifier's input besides,
    where it is."""

    def __init__(self, classifier: Classifier) -> None:
        self.encoder: Reader | None = None
        self._classifier = classifier
        self._deny: frozenset[str] = frozenset()
        self._deny_spelt: frozenset[str] = frozenset()
        self._pause = asyncio.Lock()  # of the checks of long texts one at a time goes on in a turn of the loop
        self._known: dict[int, Floats] = {}  # by the window's hash: what was said is not kept
        self._read: dict[int, Floats] = {}  # the same of windows that were read with the encoder
        self._found: dict[int, list[Finding]] = {}  # by rules, by the text's hash
        self._open: set[int] = set()  # hashes of texts that hide nothing: the classifier reads what the rules read

    def follow(self, deny: Iterable[str]) -> None:
        """Look for other phrases from now on."""
        self.forget()
        self._deny = frozenset(folded for phrase in deny for folded in foldings(phrase))
        # What was spelt letter by letter comes out without the spaces between its words.
        self._deny_spelt = self._deny | {phrase.replace(" ", "") for phrase in self._deny}

    def forget(self) -> None:
        """Remember no text: what was found in it went by the phrases of another policy."""
        self._found.clear()
        self._open.clear()
        self._known.clear()
        self._read.clear()

    async def find_by_form(
        self, request: Request, extra: Mapping[str, Any] | None = None, native: NativeRequest | None = None
    ) -> list[Finding]:
        """Return what the rules find in a request (``texts_of``), each once.

        A long text is looked at in slices, and many short ones a few at a time, with turns for others between.
        """
        found: set[Finding] = set()
        async for text in self._in_turns(texts_of(request, extra, native)):
            found.update(await self._rules_on(text))
        if ids := ids_of(request):  # some are long numbers, and no card numbers
            found.update(one for one in await self._rules_on(ids) if one.group in ("secrets", "deny"))
        if is_unreadable(request):
            found.add(UNREADABLE)
        return sorted(found)

    async def _rules_on(self, text: str) -> Iterable[Finding]:
        if len(text) <= SLICE:
            return self.rule_findings(visible(text))
        return [finding async for piece in self.slices(text) for finding in self.rule_findings(piece)]

    def rule_findings(self, text: str) -> list[Finding]:
        """Return what the rules find in a text of a few thousand characters, and in what it hides; from memory if it
        was looked at before."""
        key = _key_of(text)
        known = self._found.get(key)
        if known is None:
            shown = plain(text)
            inside = hidden(shown)
            known = [finding for one in (shown, *inside) for finding in find_by_rules(one)]
            if self._deny and (
                holds_phrase(text, self._deny) or any(holds_phrase(one, self._deny_spelt) for one in inside)
            ):
                known.append(PHRASE)
            if len(self._found) >= REMEMBERED:
                self._found.clear()
                self._open.clear()
            self._found[key] = known
            if not inside:
                self._open.add(key)
        return known

    async def judge(self, texts: Iterable[str]) -> list[Finding]:
        """Return the categories that the classifier finds in texts."""
        whole = [*texts]
        shares = _shares_of(whole)
        worst = [await self._worst_logits(text, next(shares)) async for text in self._in_turns(whole)]
        return findings_of(np.max(worst, axis=0)) if worst else []

    async def judge_told(self, texts: Iterable[str]) -> list[Finding]:
        """Return whether texts that tools told hold an attack: passage by passage, for what is around dilutes it."""
        whole, worst = [*texts], list[Floats]()
        shares = _shares_of(whole)
        async for text in self._in_turns(whole):
            share = next(shares)
            async for piece in self.slices(text):
                said = [evened(plain(passage).lower()) for passage in passages(unmarked(piece))]
                worst += [logits async for logits, _ in self._judged(said, share)]
        return findings_of(np.max(worst, axis=0), ("attack",)) if worst else []

    async def score(self, text: str, share: EncoderShare | None = None) -> dict[str, float]:
        """Return the score of every category for a text; ``share``: of the request that it came in."""
        return scores_of(await self._worst_logits(text, share or EncoderShare(), fully=True))

    async def _worst_logits(self, text: str, share: EncoderShare, *, fully: bool = False) -> Floats:
        """Return the highest logits of any window of a text, and of the form of any slice."""
        worst: list[Floats] = []
        async for shown in self.slices(text):
            piece = unmarked(shown)
            windows = readings(piece, hides=_key_of(shown) not in self._open)
            found = [each async for each in self._judged(windows, share, fully=fully)]
            worst.append(
                self._classifier.with_form(
                    np.max([logits for logits, _ in found], axis=0), piece, is_read=all(is_read for _, is_read in found)
                )
            )
        return np.max(worst, axis=0)

    async def _judged(
        self, windows: Sequence[str], share: EncoderShare, *, fully: bool = False
    ) -> AsyncIterator[tuple[Floats, bool]]:
        """Yield the logits of windows, read with the encoder where it answers, and whether they are; others have their
        turn between."""
        keys = [_key_of(window) for window in windows]
        read: Mapping[int, Vectors] = {}
        if self.encoder is not None:
            fresh: dict[int, str] = {}
            for key, window in zip(keys, windows, strict=True):
                if (fully or key not in self._read) and key not in fresh and share.left > 0:
                    share.left -= max(len(window), LEAST)
                    fresh[key] = window
            if fresh and (vectors := await self.encoder.read(list(fresh.values()))) is not None:
                read = dict(zip(fresh, vectors, strict=True))
        for place, (key, window) in enumerate(zip(keys, windows, strict=True)):
            if place:
                await asyncio.sleep(0)
            vector = read.get(key)
            if fully:
                yield self._classifier.logits(window, read=vector, fully=True), vector is not None
            elif vector is not None:
                yield self._remember(self._read, key, self._classifier.logits(window, read=vector)), True
            else:
                yield (self._read[key], True) if key in self._read else (self.logits(window), False)

    def logits(self, window: str) -> Floats:
        """Return the classifier's logits of a window without the encoder, from memory if it was judged before."""
        key = _key_of(window)
        known = self._known.get(key)
        return self._remember(self._known, key, self._classifier.logits(window)) if known is None else known

    @staticmethod
    def _remember(known: dict[int, Floats], key: int, logits: Floats) -> Floats:
        if len(known) >= REMEMBERED:
            known.clear()
        known[key] = logits
        return logits

    async def slices(self, text: str) -> AsyncIterator[str]:
        """Yield a text in slices that overlap, without what is not seen in it, with a turn for others between them."""
        held = ""
        for start in range(0, len(text) or 1, SLICE):
            if start:
                await self._others_turn()
            held += visible(text[start : start + SLICE])
            if len(held) >= SLICE or start + SLICE >= len(text):
                yield held
                held = held[-OVERLAP:]

    async def _in_turns(self, texts: Iterable[str]) -> AsyncIterator[str]:
        """Yield texts, with a turn for others after as many characters as a slice has."""
        looked_at = 0
        for text in texts:
            if looked_at >= SLICE:
                looked_at = 0
                await self._others_turn()
            looked_at += max(len(text), LEAST)
            yield text

    async def _others_turn(self) -> None:
        async with self._pause:
            await asyncio.sleep(0)


def _shares_of(texts: Sequence[str]) -> Iterator[EncoderShare]:
    """Return for each text of a request what it has of the encoder: the last one all that it needs, if that is there,
    and those before it what is left. A text is read in windows that have it twice, at the most."""
    left, shares = ENCODED_AT_MOST, list[EncoderShare]()
    for text in reversed(texts):
        shares.append(EncoderShare(min(left, 2 * max(len(text), LEAST))))
        left -= shares[-1].left
    return reversed(shares)


def _key_of(text: str) -> int:
    return hash((text, len(text)))  # one of another width may have the same bytes, and so the same hash
