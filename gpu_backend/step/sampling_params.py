# How the tokens of a reply are chosen, as its request says.

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

# What may stand between the tokens of generated JSON: a space, or one line break with the next line's indentation. A
# grammar that lets more through lets a model fill its reply with blanks.
JSON_BLANKS = r"( |\n[ \t]{0,16})?"


class GrammarKind(StrEnum):
    """What a grammar's text is."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON
    REGEX = "regex"  # a regular expression for the whole reply, in the syntax of Rust's regex crate
    CHOICE = "choice"  # a JSON list of texts, one of which is the reply
    LARK = "lark"  # rules in llguidance's dialect of Lark
    EBNF = "ebnf"  # rules as llama.cpp and SGLang write them (GBNF), from ``root`` on


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of a reply must look like."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits.

    ``temperature`` 0 means the most likely token. ``seed`` makes the noise a function of (seed, reply index, position),
    so equal logits give equal tokens whatever else is in the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives to report beside the chosen token; None: no logprobs at all
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; its first reply reports them
    presence_penalty: float = 0.0  # taken off the logit of every token that the reply has
    frequency_penalty: float = 0.0  # the same, for each time that the reply has it
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or reply, multiplies negative ones
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id and what is added to its logit
    min_tokens: int = 0  # tokens before which no stop token may come; a grammar that is complete ends a reply before
    grammar: Grammar | None = None
    # Whether a draw takes logits as they are, and reports nothing but the token: asked of every row in every step.
    is_plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        changed = self.penalises_reply or self.logit_bias or self.min_tokens or self.grammar is not None
        object.__setattr__(self, "is_plain", self.logprobs is None and not changed)

    @property
    def filters(self) -> bool:
        """Whether some tokens may not be drawn because others are likelier."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalises_reply(self) -> bool:
        """Whether the next token depends on how often the reply has each token."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def penalties(self) -> tuple[float, float, float]:
        """For repetition, for each time, for having come at all."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty
