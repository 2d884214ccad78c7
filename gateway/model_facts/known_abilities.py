# What the field's models can do, where a file offers a provider's models without a word on each: told by their names
# (the makers' pages on models, November 2026). What is not known to see pictures is not shown any.

from __future__ import annotations

import re

# Models that the gateway has no endpoint for, or that do one thing alone.
OTHERS = re.compile(
    r"audio|tts|transcri|whisper|realtime|(?:^|[-/])live|image|banana|omni|moderation|ocr|guard|voice|robotics|video|rerank"
    r"|computer-use|speech|voxtral|orpheus|gpt-3\.5-turbo-instruct|^(?:ada|babbage|curie|davinci)"
    r"|text-(?:ada|babbage|curie|davinci)|(?:babbage|davinci)-00|^ft:|\.ft-|search|sonar|deep-research|:free$"
)
EMBEDS = re.compile(r"embed|(?:^|[-/])(?:bge|e5|gte|voyage)-")
SEES = re.compile(
    r"gpt-(?:4o|4\.1|4-turbo|4\.5|[5-9])(?!.*oss)|chatgpt-4o|(?:^|/)o(?:1(?!-(?:mini|preview))|3(?!-mini)|4)|claude|gemini"
    r"|gemma-[34]|llama-?(?:4|v?3[.p]2-(?:11|90)b)|pixtral|vision|[-.]vl|grok-(?:4|2-vision)|mistral-(?:medium|small|large)-(?:[3-9]|2[5-9])"
)


def is_offered(model: str) -> bool:
    """Whether a model answers chats or makes vectors, as far as its name tells."""
    return OTHERS.search(model.lower()) is None


def embeds(model: str) -> bool:
    """Whether a model makes vectors, and nothing else."""
    return EMBEDS.search(model.lower()) is not None


def sees(model: str) -> bool:
    """Whether a model is known to take pictures."""
    return SEES.search(model.lower()) is not None
