# Prompts become tokens here, and are refused here when they are too long: the engine never hears of them.

from __future__ import annotations

from collections.abc import Sequence

from gpu_backend.server.checkpoint.checkpoint import Checkpoint
from gpu_backend.server.checkpoint.tokens import LONG_TEXT, TooManyTokens
from gpu_backend.server.client.errors import ContextLengthExceeded
from protocol.chat import Message, Tool
from protocol.completions import Prompts
from protocol.errors import BadRequest, UnsupportedParameter, invalid_param
from protocol.serving.off_loop import in_parallel

MAX_PROMPTS = 2048


def render_chat(
    checkpoint: Checkpoint, messages: Sequence[Message], tools: Sequence[Tool] = (), effort: str | None = None
) -> str:
    """Return a conversation as the model reads it. Raises ``BadRequest``, also for a model without a template."""
    if checkpoint.chat is None:
        words = "This model has no chat template, so it cannot chat. Use /v1/completions instead."
        raise UnsupportedParameter(words, param="messages")
    template = checkpoint.tool_chat if tools and checkpoint.tool_chat is not None else checkpoint.chat
    return template.render(messages, tools, effort)


async def encode_chat(checkpoint: Checkpoint, text: str, max_model_len: int) -> tuple[int, ...]:
    """Return the tokens of a rendered conversation. Raises ``BadRequest`` for a context too short."""
    return await in_parallel(
        len(text), LONG_TEXT, lambda: _encode(checkpoint, text, max_model_len, 1, "messages", is_rendered=True)
    )


async def encode_prompts(
    checkpoint: Checkpoint, prompts: Prompts, max_model_len: int, *, room_for_reply: int, param: str
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of one prompt or several, given as texts or as token ids. Raises ``BadRequest``."""
    several = split_prompts(prompts)
    if not several:
        raise _empty(param)
    if len(several) > MAX_PROMPTS:
        message = f"'{param}' holds {len(several)} entries; one request takes at most {MAX_PROMPTS}."
        raise invalid_param(param, message)

    def encode_all() -> tuple[tuple[int, ...], ...]:
        return tuple(_encode(checkpoint, prompt, max_model_len, room_for_reply, param) for prompt in several)

    return await in_parallel(sum(map(len, several)), LONG_TEXT, encode_all)


def split_prompts(prompts: Prompts) -> list[str | list[int]]:
    """Return the prompts of a request one by one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # elements are of one kind
    return prompts  # type: ignore[return-value]


def _encode(
    checkpoint: Checkpoint,
    prompt: str | list[int],
    max_model_len: int,
    room_for_reply: int,
    param: str,
    *,
    is_rendered: bool = False,
) -> tuple[int, ...]:
    """Return the tokens of a prompt; one that ``is_rendered`` has its special ones."""
    most = max_model_len - room_for_reply
    if isinstance(prompt, str):
        try:
            tokens = checkpoint.codec.encode(prompt, most, add_special_tokens=not is_rendered)
        except TooManyTokens as exc:
            raise ContextLengthExceeded(max_model_len, exc.count, param, counted_whole=exc.counted_whole) from exc
    elif len(prompt) > most:
        raise ContextLengthExceeded(max_model_len, len(prompt), param)
    else:
        check_token_ids(prompt, checkpoint.vocab_size, param)
        tokens = tuple(prompt)
    if not tokens:
        raise _empty(param)
    return tokens


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ``BadRequest`` unless every id is in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        message = f"'{param}' holds the token id {wrong}; this model's ids are 0 to {vocab_size - 1}."
        raise invalid_param(param, message)


def _empty(param: str) -> BadRequest:
    return invalid_param(param, f"'{param}' is empty; the model needs at least one token.")
