# System prompts that an operator declares to be no secret: their beginnings are computed once for all tenants.

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

from gpu_backend.server.checkpoint.checkpoint import Checkpoint
from protocol.chat import Message
from protocol.errors import BadRequest

LONGEST = 1_000_000  # tokens


def shared_prefixes(checkpoint: Checkpoint, file: Path) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that every conversation with one of the file's system prompts begins with.

    The file is a JSON list of texts. What is common to two conversations under the model's template is shared, so that
    no template's way with system prompts matters. Raises ``OSError`` without the file, ``ValueError`` for any other
    content, or for a model without a chat template.
    """
    texts = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{file} must hold a JSON list of system prompts, each a text")
    if checkpoint.chat is None:
        raise ValueError(f"{file} declares system prompts, but the model has no chat template")
    try:
        return tuple(_beginning(checkpoint, text) for text in texts)
    except BadRequest as exc:
        raise ValueError(f"{file}: {exc}") from exc


def _beginning(checkpoint: Checkpoint, text: str) -> tuple[int, ...]:
    assert checkpoint.chat is not None
    one, other = (
        checkpoint.codec.encode(
            checkpoint.chat.render([Message(role="system", content=text), Message(role="user", content=question)]),
            LONGEST,
            add_special_tokens=False,
        )
        for question in ("Why?", "0")
    )
    return tuple(token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
