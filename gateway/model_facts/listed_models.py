# What a price library may say of a model, and what it does not say, told by their names (the makers' pages on models,
# November 2026): the longest answers, and what they can do.

from __future__ import annotations

import re

from msgspec import Struct

from billing.core.prices import Price
from gateway.model_facts.claude_models import rules_of


class ListedModel(Struct, frozen=True, kw_only=True):
    """A model as the library lists it."""

    price: Price
    context: int | None  # tokens
    has_output: bool  # whether the price says what answers cost; vectors have no such price


class NoPrice(Struct, frozen=True):
    """The library cannot say what the model costs."""

    why: str  # "the price library …"


# Tokens, thinking included, as the makers' pages on models have it (November 2026); the first that matches.
KNOWN = (
    (re.compile(r"\bgpt-5(?!.*-chat)"), 128_000),
    (re.compile(r"\bgpt-4\.1"), 32_768),
    (re.compile(r"\bo1-(?:mini|preview)"), 32_768),
    (re.compile(r"\bo[134](?:-|$)"), 100_000),
    (re.compile(r"\bgemini-(?:2\.5|[3-9])"), 65_536),
    (re.compile(r"\bgemini-[12]"), 8_192),
)


def longest_output(upstream_model: str) -> int | None:
    """Return the most tokens that an answer of the model can have, or ``None`` for a model that is not known."""
    known = next((most for pattern, most in KNOWN if pattern.search(upstream_model.lower())), None)
    return known or rules_of(upstream_model).max_output


# Models that the gateway has no endpoint for, or that do one thing alone.
OTHERS = re.compile(
    r"(?<!gpt-)audio|tts|transcri|whisper|realtime|(?:^|[-/])live|image|banana|omni|moderation|ocr|guard|voice|robotics|video|rerank"
    r"|computer-use|speech|voxtral|orpheus|gpt-3\.5-turbo-instruct|^(?:ada|babbage|curie|davinci)"
    r"|text-(?:ada|babbage|curie|davinci)|(?:babbage|davinci)-00|^ft:|\.ft-|search|sonar|deep-research|:free$"
)
EMBEDS = re.compile(r"embed|(?:^|[-/])(?:bge|e5|gte|voyage)-")
SEES = re.compile(
    r"gpt-(?:4o|4\.1|4-turbo|4\.5|[5-9])(?!.*oss)|chatgpt-4o|(?:^|/)o(?:1(?!-(?:mini|preview))|3(?!-mini)|4)|claude|gemini"
    r"|gemma-[34]|llama-?(?:4|v?3[.p]2-(?:11|90)b)|pixtral|vision|[-.]vl|grok-(?:4|2-vision)|mistral-(?:medium|small|large)-(?:[3-9]|2[5-9])"
)
SPEAKS = re.compile(r"^gpt-audio")
HEARS = re.compile(r"gemini-(?:[2-9]|1\.5)|(?<!/)gpt-audio")  # of another's gpt-audio no price is known


def is_offered(model: str) -> bool:
    """Whether a model answers chats or makes vectors, as far as its name tells."""
    return OTHERS.search(model.lower()) is None


def embeds(model: str) -> bool:
    """Whether a model makes vectors, and nothing else."""
    return EMBEDS.search(model.lower()) is not None


def sees(model: str) -> bool:
    """Whether a model is known to take pictures."""
    return SEES.search(model.lower()) is not None


def hears(model: str) -> bool:
    """Whether a model is known to take recordings in its chats."""
    return HEARS.search(model.lower()) is not None


def speaks(model: str) -> bool:
    """Whether a model is known to answer chats by voice."""
    return SPEAKS.search(model.lower()) is not None
