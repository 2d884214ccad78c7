# What the front needs to know of a checkpoint: its tokenizer, its chat template, where replies end, how it likes to be
# sampled. Read once, from the small files; the weights are the engine's.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from gpu_backend.server.checkpoint.chat_template import ChatTemplate, read_template
from gpu_backend.server.checkpoint.harmony import LAST
from gpu_backend.server.checkpoint.sight import Sight, load_sight
from gpu_backend.server.checkpoint.tokens import TextCodec, read_json, special_tokens


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a checkpoint's generation_config.json recommends, used where a request does not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One model as the front sees it. ``chat`` is None for a model without a chat template."""

    codec: TextCodec
    chat: ChatTemplate | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    hidden_size: int
    defaults: SamplingDefaults
    fingerprint: str  # changes when the model's configuration does
    created: int  # unix seconds
    sight: Sight | None = None  # how it reads pictures; None: it reads texts alone
    tool_chat: ChatTemplate | None = None  # the template for requests with tools, where the model has one


def load_checkpoint(folder: Path, tokenizer_folder: Path | None = None) -> Checkpoint:
    """Read a Hugging Face checkpoint's small files; the tokenizer and the chat template from their own folder, if any.

    Raises ``FileNotFoundError`` for a folder that is none, ``ValueError`` for files that make no sense.
    """
    words = tokenizer_folder or folder
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} has no config.json; --model names the folder of a Hugging Face checkpoint")
    config = read_json(folder / "config.json")
    config |= config.get("text_config") or {}  # of a model that sees
    for name in ("vocab_size", "hidden_size"):
        if not isinstance(config.get(name), int):
            raise ValueError(f"{folder / 'config.json'} has no {name}")
    generation = read_json(folder / "generation_config.json")
    tokenizer_config = read_json(words / "tokenizer_config.json")
    codec = TextCodec.load(words)
    if words != folder and codec.vocab_size > config["vocab_size"]:
        raise ValueError(
            f"the tokenizer of {words} has {codec.vocab_size} tokens, more than the {config['vocab_size']} that the "
            f"model of {folder} knows; a tokenizer made for this model is needed"
        )
    names = special_tokens(tokenizer_config)
    template = read_template(words, tokenizer_config)
    sight = load_sight(folder, codec)
    sees = sight is not None
    chat = ChatTemplate(template, names, codec.added_tokens, sees=sees) if template else None
    for_tools = read_template(words, tokenizer_config, for_tools=True)
    if for_tools in (None, template):
        tool_chat = chat
    else:
        tool_chat = ChatTemplate(for_tools, names, codec.added_tokens, sees=sees)
    return Checkpoint(
        codec=codec,
        chat=chat,
        sight=sight,
        tool_chat=tool_chat if tool_chat is not None and tool_chat.tool_style is not None else None,
        eos_token_ids=_eos_token_ids(codec, names, config, generation) | _last_tokens(codec, chat),
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        defaults=_defaults(generation),
        fingerprint="fp_" + blake2b(msgspec.json.encode([config, template]), digest_size=6).hexdigest(),
        created=int((folder / "config.json").stat().st_mtime),
    )


def _eos_token_ids(codec: TextCodec, names: Mapping[str, str], *configs: Mapping[str, Any]) -> frozenset[int]:
    """Collect what any of the files calls an end of sequence: an id, a list of ids, or the tokenizer's name for it."""
    found: set[int] = set()
    for config in configs:
        given = config.get("eos_token_id")
        found.update(given if isinstance(given, list) else [] if given is None else [given])
    named = codec.token_id(names["eos_token"]) if "eos_token" in names else None
    return frozenset(found if named is None else found | {named})


def _last_tokens(codec: TextCodec, chat: ChatTemplate | None) -> frozenset[int]:
    """Return what ends replies of GPT-OSS, be it named as an end or not: its calls end a reply, too."""
    found = (codec.token_id(text) for text in (LAST if chat is not None and chat.is_harmony else ()))
    return frozenset(token for token in found if token is not None)


def _defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    known = {name: generation[name] for name in SamplingDefaults.__slots__ if generation.get(name) is not None}
    return SamplingDefaults(**known)
