# Structured output: which tokens may come next so that a reply follows a JSON schema, a regular expression or a list of
# choices. The grammars are llguidance's; without that library an engine serves everything else.
#
# A grammar is compiled once, on a thread of its own, and copied for each reply. A reply's constraint advances with each
# token of the reply, so like these it survives preemption, and another replica can build it again.

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_backend.kernels.layout.upload import upload
from gpu_backend.step.sampling_params import JSON_BLANKS, Grammar, GrammarKind

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_EBNF = 8 * 1024  # characters: the library passes over all rules for each, the interpreter held, 0.4 s at worst
KEPT = 256  # compiled grammars, the least recently used go first
# What one mask may cost, in the library's own unit: some 2 ms. Schemas of every day stay far below; what does not is
# refused or ends alone, because a step waits for the masks of all its rows.
STEP_FUEL = 20_000
ROW_ITEMS, STEP_ITEMS = 1_000, 10_000  # of its parser: an object with 240 properties that may be missing needs fewer
# Some take long all the same: they are found out by the time that they take, and end themselves.
SLOW_BATCH = 0.05  # seconds of one step's masks, after which is looked whose they are
SLOW_MASK = 0.01  # seconds of computing for one mask; its replies may be many
TOKEN_MAY = 1e-4  # seconds that taking a token may cost, where a usual one costs 5e-6,
MOST_OWED = 0.03  # and how far a grammar's tokens may be beyond that: a machine that stands still once is not its doing
SLOW_FIRST_MASK = 0.05  # the same, where nothing is known yet of the grammar's words
TOO_SLOW = "its masks take too long to compute; make it simpler"
MASK_THREADS = min(8, os.cpu_count() or 1)
COMPILERS = 2  # threads; the library lets go of the interpreter while it compiles
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": JSON_BLANKS}


class BadGrammar(ValueError):
    """A grammar that cannot be followed: its message says why."""


@dataclass(slots=True)
class Rules:
    """What all replies of one grammar share."""

    maker: MaskMaker  # shared by all grammars of an engine
    are_slow: bool = False
    owed: float = 0.0  # seconds beyond what the tokens so far may cost

    def note(self, seconds: float, tokens: int) -> None:
        """Taking so many tokens took that long."""
        self.owed = max(0.0, self.owed + seconds - TOKEN_MAY * tokens)
        self.are_slow |= self.owed > MOST_OWED


class Constraint:
    """Where one reply stands in its grammar.

    While its mask is made, on another thread, the library allows no other access: whatever is asked of it waits for the
    mask. So a step may be given up after its masks were begun.
    """

    def __init__(self, matcher: Any, rules: Rules) -> None:
        self._own = matcher
        self._masks: Future[Tensor] | None = None  # that were begun last
        self.rules = rules

    @property
    def _matcher(self) -> Any:
        if self._masks is not None:
            wait([self._masks])
            self._masks = None
        return self._own

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_ids: Sequence[int]) -> str | None:
        """Take the reply's next tokens; return what is wrong, after which the constraint is of no use."""
        if self.rules.are_slow:
            return TOO_SLOW
        started = time.thread_time()
        follows = self._matcher.consume_tokens(list(token_ids))
        self.rules.note(time.thread_time() - started, len(token_ids))
        if follows:
            return None
        return _reason(self._matcher.get_error()) or "a token does not follow the grammar"

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Say how many of these tokens may come next, one after the other, so that the reply goes on after them."""
        count: int = self._matcher.validate_tokens(list(token_ids))
        while count:
            after = self.copy()
            if after.accept(token_ids[:count]) is None and not after.is_complete:
                break
            count -= 1
        return count

    def copy(self) -> Constraint:
        """Return an independent constraint that stands where this one does."""
        return Constraint(self._matcher.deep_copy(), self.rules)


class MaskMaker:
    """Makes the masks of many constraints at once, on threads of its own that need no interpreter."""

    def __init__(self) -> None:
        from llguidance import LLExecutor

        self._threads = LLExecutor(MASK_THREADS)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, standing: Sequence[tuple[Any, Rules]], vocab_size: int) -> Future[Tensor]:
        """Begin with a row of bits for each matcher. None of them may be touched before all are done."""
        return self._beside.submit(self._make, standing, vocab_size)

    def _make(self, standing: Sequence[tuple[Any, Rules]], vocab_size: int) -> Tensor:
        words = torch.zeros(len(standing), -(-vocab_size // 32), dtype=torch.int32)
        matchers = [(matcher, row) for row, (matcher, _) in enumerate(standing)]
        started = time.perf_counter()
        self._threads.unsafe_compute_mask_ptr(matchers, words.data_ptr(), words.shape[1] * 4, len(standing))
        if time.perf_counter() - started > SLOW_BATCH:
            for matcher, rules in {id(rules): (matcher, rules) for matcher, rules in standing}.values():
                rules.are_slow |= min(_try_mask(matcher)[1] for _ in range(2)) > SLOW_MASK
        return words


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
        tokenizer, maker = self._tokenizer.result()
        limits = LLParserLimits(step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS, max_items_in_row=ROW_ITEMS)
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise BadGrammar(_reason(matcher.get_error()))
        problem, seconds = _try_mask(matcher)  # it tells of what allows nothing
        if problem or seconds > SLOW_FIRST_MASK:
            raise BadGrammar(problem or TOO_SLOW)
        return Constraint(matcher, Rules(maker))

    def _read_tokenizer(self) -> tuple[Any, MaskMaker]:
        from llguidance import LLTokenizer

        file = str(self._folder / "tokenizer.json")
        tokenizer = LLTokenizer(file, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None)
        return tokenizer.with_slices(LLTokenizer.json_slices()), MaskMaker()


def is_available() -> bool:
    """Whether the grammar library is installed."""
    return importlib.util.find_spec("llguidance") is not None


def begin_masks(constraints: Sequence[Constraint | None], vocab_size: int) -> Future[Tensor] | None:
    """Begin with a row of int32 on the CPU for each that is a constraint: a bit for every token, set if it may come
    next. They are made while the model computes; None if there are none.
    """
    some = [constraint for constraint in constraints if constraint is not None]
    if not some:
        return None
    masks = some[0].rules.maker.begin([(each._matcher, each.rules) for each in some], vocab_size)
    for constraint in some:
        constraint._masks = masks
    return masks


def apply_masks(logits: Tensor, rows: Sequence[int], words: Tensor) -> None:
    """Put -inf where a row's mask has no bit; ``words`` (len(rows), ⌈vocab / 32⌉) are int32 on the CPU."""
    octets = upload(words, logits.device, torch.int32).view(torch.uint8).view(-1).int()
    terms = _terms_of_octets(logits.device).index_select(0, octets).view(len(rows), -1)[:, : logits.shape[-1]]
    if len(rows) == len(logits):
        logits += terms
    else:
        logits.index_add_(0, upload(rows, logits.device, torch.long), terms)


@cache
def _terms_of_octets(device: torch.device) -> Tensor:
    """Return what to add to the logits of eight tokens for every octet of a mask: 0 where its bit is set, else -inf."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(bits == 0, -torch.inf)


def _try_mask(matcher: Any) -> tuple[str, float]:
    """Return what is wrong with the next mask, if anything is, and the seconds of computing that it took."""
    probe, started = matcher.deep_copy(), time.thread_time()
    probe.compute_bitmask()
    return _reason(probe.get_error()), time.thread_time() - started


def _reason(error: str) -> str:
    """Return what the library says is wrong, in one line: the first, and of an expression what is wrong in it."""
    if error.startswith("NoExtensionBias"):
        return "it allows no text at all"
    first, *others = error.split("\n")
    said, _, _ = first.partition(" (in regex): regex parse error:")
    details = [line for line in others if line.startswith("error: ")]
    return said[:300] + "".join(f"; {line.removeprefix('error: ')[:300]}" for line in details[:1])


def _source(grammar: Grammar) -> str:
    """Return the grammar in the library's own language."""
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_OPTIONS)
            except ValueError as error:
                raise BadGrammar(_reason(str(error))) from error
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(_lark_of(grammar.text))


def _lark_of(ebnf: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(ebnf) > MAX_EBNF:
        raise BadGrammar(f"it has more than {MAX_EBNF} characters; write it in Lark, as guided_grammar")
    try:
        return gbnf_to_lark(ESCAPE.sub(_character, ebnf))
    except RecursionError as error:
        raise BadGrammar("its groups are nested too deeply") from error
    except Exception as error:  # the library's have no class of their own
        raise BadGrammar(_reason(str(error))) from error


def _character(escape: re.Match[str]) -> str:
    """Return the character of an escape by its number, which the library misreads."""
    number = int(escape[1] or escape[2] or "0", 16)
    return escape[0] if number == 0 else chr(number) if number >= 0x80 else f"\\x{number:02x}"
