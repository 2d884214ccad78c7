# One reply being written: the engine's tokens become pieces of text with what belongs to them, and the rules that end a
# reply by its text are kept here. Pure: events in, pieces out.

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_backend.server.checkpoint.harmony import HarmonyDetokenizer
from gpu_backend.server.checkpoint.tokens import Detokenizer, StopStrings, TextCodec
from gpu_backend.step.messages import FinishReason, NewTokens, Timings
from gpu_backend.step.plan import TokenLogprob
from gpu_backend.step.sampling_params import SamplingParams
from protocol.errors import invalid_param


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the reply with its log-probability; ``offset`` is where its text begins, in characters."""

    token_id: int
    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """What one reply gained. ``finish_reason`` comes with the last piece that says anything."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None
    gpu_seconds: float = 0.0  # of the reply so far
    prompt_scores: tuple[TokenLogprob, ...] | None = None  # with the first piece, where the prompt was to be scored


class ReplyWriter:
    """Writes reply number ``index`` of a call.

    ``resumed`` are tokens that another replica already made: they pass through the same rules, and text is given out
    from character ``skip`` on. Raises ``BadRequest`` if they have no such character.
    """

    def __init__(
        self,
        index: int,
        codec: TextCodec,
        sampling: SamplingParams,
        stops: Sequence[str] = (),
        eos_token_ids: frozenset[int] = frozenset(),
        resumed: Sequence[int] = (),
        skip: int = 0,
        detokenizer: Detokenizer | HarmonyDetokenizer | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0  # of the whole reply, resumed ones included
        self.cached_tokens = 0
        self.gpu_seconds = 0.0
        self.timings: Timings | None = None
        self.finish_reason: FinishReason | None = None  # set once the text has its end
        self._sampling = sampling
        self._silent = frozenset() if sampling.ignore_eos else eos_token_ids
        self._detokenizer = detokenizer or Detokenizer(codec)
        self._stops = StopStrings(stops)
        self._length = 0  # characters decoded
        self._shown = 0  # characters given out, or skipped
        self._waiting: deque[ScoredToken] = deque()  # their text is kept back
        self._skip = 0
        self.beginning: Piece | None = None  # what is said before the engine does anything
        if resumed:
            self.beginning = self._resume(resumed, skip)
        elif sampling.max_tokens == 0 and sampling.prompt_logprobs is None:
            self.finish_reason = FinishReason.LENGTH
            self.beginning = Piece(index, finish_reason=FinishReason.LENGTH)

    def write(self, event: NewTokens) -> Piece | None:
        """Take in an event of this reply; return what it adds, or None if that is nothing.

        After the text has ended, further tokens are ignored: the engine had not heard of it yet.
        """
        self.cached_tokens = event.cached_tokens
        self.gpu_seconds = event.gpu_seconds
        self.timings = event.timings or self.timings
        if self.finish_reason is not None:
            return None
        if self._sampling.max_tokens == 0:  # the prompt alone was wanted; the engine makes a token with its scores
            self.finish_reason = FinishReason.LENGTH
            return Piece(self.index, finish_reason=self.finish_reason, gpu_seconds=self.gpu_seconds)
        return self._add(event.token_ids, event.logprobs, event.finish_reason)

    def _add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], reason: FinishReason | None
    ) -> Piece | None:
        words: list[str] = []
        taken = 0
        for token_id, logprob in zip(token_ids, logprobs or (None,) * len(token_ids), strict=True):
            taken += 1
            self.num_tokens += 1
            if token_id in self._silent:
                continue
            if logprob is not None:
                self._waiting.append(ScoredToken(token_id, self._length, logprob))
            text = self._detokenizer.feed(token_id)
            self._length += len(text)
            shown, has_stopped = self._stops.feed(text, self.num_tokens > self._sampling.min_tokens)
            words.append(shown)
            if has_stopped:
                self.finish_reason = FinishReason.STOP
                break
        if self.finish_reason is None and reason is not None:
            words.append(self._end())
            self.finish_reason = reason
        text = self._unskipped("".join(words))
        if not (text or taken or self.finish_reason):
            return None
        return Piece(self.index, text, tuple(token_ids[:taken]), self._scored(), self.finish_reason, self.gpu_seconds)

    def _end(self) -> str:
        """Return what was kept back; the last bytes may still complete a stop string."""
        shown, has_stopped = self._stops.feed(self._detokenizer.finish())
        return shown if has_stopped else shown + self._stops.finish()

    def _unskipped(self, text: str) -> str:
        self._shown += len(text)
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]

    def _scored(self) -> tuple[ScoredToken, ...]:
        """Take the scored tokens whose text is out; at the end of the reply, all but those of the stop string."""
        is_all_out = self.finish_reason is not None and self._shown >= self._length
        ready: list[ScoredToken] = []
        while self._waiting and (is_all_out or self._waiting[0].offset < self._shown):
            ready.append(self._waiting.popleft())
        return tuple(ready)

    def _resume(self, token_ids: Sequence[int], skip: int) -> Piece:
        self._skip = skip
        ended = next((i + 1 for i, token in enumerate(token_ids) if token in self._sampling.stop_token_ids), None)
        reason = FinishReason.STOP if ended is not None else None
        if reason is None and len(token_ids) >= self._sampling.max_tokens:
            ended, reason = self._sampling.max_tokens, FinishReason.LENGTH
        piece = self._add(tuple(token_ids[:ended]), (), reason)
        assert piece is not None
        if skip > self._length:
            message = f"The text of 'resume_token_ids' has {self._length} characters; 'resume_text_chars' is {skip}."
            raise invalid_param("resume_text_chars", message)
        return Piece(self.index, piece.text, (), (), piece.finish_reason)


def join_replies(pieces: Iterable[Piece], num_replies: int) -> list[Piece]:
    """Return the pieces of each reply as one piece."""
    own: list[list[Piece]] = [[] for _ in range(num_replies)]
    for piece in pieces:
        own[piece.index].append(piece)
    return [_join(index, pieces) for index, pieces in enumerate(own)]


def _join(index: int, own: Sequence[Piece]) -> Piece:
    return Piece(
        index=index,
        text="".join(piece.text for piece in own),
        token_ids=tuple(token for piece in own for token in piece.token_ids),
        scored=tuple(token for piece in own for token in piece.scored),
        finish_reason=next((piece.finish_reason for piece in own if piece.finish_reason), None),
        prompt_scores=next((piece.prompt_scores for piece in own if piece.prompt_scores is not None), None),
    )
