# Structured output: which tokens may come next so that a reply follows a JSON schema, a regular expression or a list of
# choices. The grammars are llguidance's; without that library an engine serves everything else.
#
# A grammar is compiled once, on a thread of its own, and copied for each reply. A reply's constraint advances with each
# token of the reply, so like these it survives preemption, and another replica can build it again.

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_backend.engine.sequence import Grammar, GrammarKind

MAX_GRAMMAR_BYTES = 256 * 1024
KEPT = 256  # compiled grammars, the least recently used go first
# What one mask may cost, in the library's own unit: some 2 ms. Schemas of every day stay far below; what does not is
# refused or ends alone, because a step waits for the masks of all its rows.
STEP_FUEL = 20_000
COMPILERS = 2  # threads; the library lets go of the interpreter while it compiles
# Bounds what a schema leaves open, so that a reply cannot consist of blanks.
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,24}"}


class BadGrammar(ValueError):
    """A grammar that cannot be followed: its message says why."""


class Constraint:
    """Where one reply stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_ids: Sequence[int]) -> str | None:
        """Take the reply's next tokens; return what is wrong, after which the constraint is of no use."""
        if self._matcher.consume_tokens(list(token_ids)):
            return None
        return self._matcher.get_error().split("\n")[0][:300] or "a token does not follow the grammar"

    def fill(self, words: Tensor) -> None:
        """Set the bit of every token that may come next; ``words`` are a row of int32 on the CPU."""
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())

    def copy(self) -> Constraint:
        """Return an independent constraint that stands where this one does."""
        return Constraint(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, off the thread that asks.

    ``folder`` holds tokenizer.json. Every grammar is compiled once while it is among the last ``KEPT``.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._threads = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._known: OrderedDict[bytes, Future[Constraint]] = OrderedDict()
        # Read at once: it may take a second, which is better spent while the weights load.
        self._tokenizer = self._threads.submit(self._read_tokenizer) if is_available() else None

    def compile(self, grammar: Grammar) -> Future[Constraint]:
        """Return a constraint at the grammar's beginning, to be copied, or ``BadGrammar``, some time later."""
        digest = blake2b(f"{grammar.kind} {grammar.text}".encode(), digest_size=16).digest()
        if (known := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            return known
        compiled = self._known[digest] = self._threads.submit(self._compile, grammar)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> Constraint:
        if self._tokenizer is None:
            raise BadGrammar("this engine was installed without llguidance, which structured output needs")
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise BadGrammar(f"it has more than {MAX_GRAMMAR_BYTES} bytes")
        matcher = LLMatcher(
            self._tokenizer.result(), _source(grammar), log_level=0, limits=LLParserLimits(step_lexer_fuel=STEP_FUEL)
        )
        if matcher.is_error():
            raise BadGrammar(matcher.get_error().split("\n")[0][:300])
        return Constraint(matcher)

    def _read_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(
            str(self._folder / "tokenizer.json"), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
        )


def is_available() -> bool:
    """Whether the grammar library is installed."""
    return importlib.util.find_spec("llguidance") is not None


def apply_constraints(logits: Tensor, constraints: Sequence[tuple[int, Constraint]]) -> None:
    """Put -inf in place of what each row's constraint forbids; ``logits`` are (rows, vocab).

    The masks are computed here, on the host, while the device is still busy with the model.
    """
    vocab = logits.shape[-1]
    words = torch.zeros(len(constraints), -(-vocab // 32), dtype=torch.int32, pin_memory=logits.device.type == "cuda")
    for row, (_, constraint) in zip(words, constraints, strict=True):
        constraint.fill(row)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = words.to(logits.device, non_blocking=True)[:, :, None] >> bits & 1
    rows = torch.tensor([row for row, _ in constraints], device=logits.device)
    forbidden = allowed.view(len(constraints), -1)[:, :vocab] == 0
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def _source(grammar: Grammar) -> str:
    """Return the grammar in the library's own language."""
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_OPTIONS)
            except ValueError as error:
                raise BadGrammar(str(error).split("\n")[0][:300]) from error
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
