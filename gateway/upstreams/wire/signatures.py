# Whose model signed a thought. A signature is opaque and good for its maker's models alone; Claude's is left as it is,
# Gemini's begins with its maker's name, which no signature of Claude's does.

from __future__ import annotations

from collections.abc import Iterable

from protocol.chat import RedactedThinkingBlock, ThinkingBlock

GEMINI = "gemini:"


def is_claudes(block: ThinkingBlock | RedactedThinkingBlock) -> bool:
    """Whether one of Anthropic's models takes a thought back."""
    if isinstance(block, RedactedThinkingBlock):
        return True
    return bool(block.signature) and not block.signature.startswith(GEMINI)


def geminis(blocks: Iterable[ThinkingBlock | RedactedThinkingBlock]) -> str | None:
    """Return the first signature that one of Google's models takes back, as it gave it."""
    signed = (block.signature for block in blocks if isinstance(block, ThinkingBlock))
    return next((text.removeprefix(GEMINI) for text in signed if text.startswith(GEMINI)), None)
