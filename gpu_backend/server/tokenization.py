# Texts as tokens, for routers that hash prompts and clients that count them. /tokenize, /detokenize and the render
# routes are vLLM's (its documentation, "Tokenizer API" and "Renderer APIs"). Nothing here is computed on the device;
# all of it is done in turn.

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from msgspec import Struct

from gpu_backend.server.answers import send_json
from gpu_backend.server.chat import encode_prompt, read_chat, with_pictures
from gpu_backend.server.checkpoint.tokens import LONG_TEXT, TextCodec, TooManyTokens
from gpu_backend.server.front import Front, front_of, request_id_of
from gpu_backend.server.requests.bodies import read_body
from gpu_backend.server.requests.checks import check_completion
from gpu_backend.server.requests.pictures import find_pictures
from gpu_backend.server.requests.prompts import check_token_ids, encode_prompts, render_chat
from gpu_backend.server.requests.tools import read_tools
from gpu_backend.server.wire import encode
from protocol.chat import ChatRequest, Message, Tool
from protocol.completions import CompletionRequest
from protocol.decoding import decode_with_extra
from protocol.errors import BadRequest, UnsupportedParameter, invalid_param
from protocol.serving.leaving import ended_when_client_leaves
from protocol.serving.off_loop import in_parallel, off_loop

MOST_TOKENS = 2**20  # of a text that is only counted: it may be longer than the model's context


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """A text, or a conversation as the model's chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    tools: tuple[Tool, ...] = ()
    add_special_tokens: bool | None = None  # None: for a text, but not for a conversation, whose template has them
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    reasoning_effort: str | None = None  # of a conversation, where the template has words for it


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    tokens: tuple[int, ...]
    model: str | None = None


T = TypeVar("T", TokenizeBody, DetokenizeBody)


Count = Callable[[Front, bytes, str], Coroutine[Any, Any, bytes]]  # of a body; the request's id


class CountResponse(Struct, eq=False):
    """Counts in its turn, and answers with the JSON of that; not at all where its client has left before."""

    _front: Front
    _raw: bytes
    _count: Count
    _request_id: str

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Wait, count, and answer."""
        with ended_when_client_leaves(scope, receive):
            count = partial(self._count, self._front, self._raw, self._request_id)
            await send_json(send, await self._front.counts.take(len(self._raw), count), self._request_id)


async def _tokens(front: Front, raw: bytes, _: str) -> bytes:
    """Return the tokens of a text or of a conversation, also of one that is too long for the model."""
    max_model_len = front.max_model_len
    body = await off_loop(len(raw), lambda: _read(raw, TokenizeBody, front))
    text = await off_loop(len(raw), lambda: _text_of(body, front))
    adds = body.messages is None and body.add_special_tokens is not False
    codec = front.checkpoint.codec
    try:
        tokens = await in_parallel(
            len(text), LONG_TEXT, lambda: codec.encode(text, MOST_TOKENS, add_special_tokens=adds)
        )
    except TooManyTokens as exc:
        raise invalid_param("prompt", f"The text has more than {MOST_TOKENS} tokens. Send it in parts.") from exc
    pictures = find_pictures(body.messages or (), front.settings.engine.pictures)
    tokens = (await with_pictures(front, tokens, pictures, "", MOST_TOKENS))[0]

    def write() -> bytes:
        shown = [_decoded(codec, (token,)) for token in tokens] if body.return_token_strs else None
        counts = {"count": len(tokens), "max_model_len": max_model_len}
        return encode(counts | {"tokens": tokens, "token_strs": shown})

    return await off_loop(len(text), write)


async def _text(front: Front, raw: bytes, _: str) -> bytes:
    """Return the text of a run of tokens, special ones by their names."""
    body = await off_loop(len(raw), lambda: _read(raw, DetokenizeBody, front))

    def write() -> bytes:
        check_token_ids(body.tokens, front.checkpoint.vocab_size, "tokens")
        return encode({"prompt": _decoded(front.checkpoint.codec, body.tokens)})

    return await off_loop(len(raw), write)


async def _rendered_completion(front: Front, raw: bytes, request_id: str) -> bytes:
    """Return the tokens of each prompt of a completion."""
    body, extensions = await off_loop(len(raw), lambda: read_body(raw, CompletionRequest))
    front.check_model(body.model)
    check_completion(body, extensions)
    prompts = await encode_prompts(front.checkpoint, body.prompt, front.max_model_len, room_for_reply=1, param="prompt")
    return encode([_rendered(request_id, body.model, tokens) for tokens in prompts])


async def _rendered_chat(front: Front, raw: bytes, request_id: str) -> bytes:
    """Return the tokens that a conversation would be computed from."""
    asked = await off_loop(len(raw), lambda: read_chat(front, raw))
    tokens, _ = await encode_prompt(front, asked, "")
    return encode(_rendered(request_id, asked.body.model, tokens))


def _read(raw: bytes, type: type[T], front: Front) -> T:
    body, extra = decode_with_extra(raw, type)
    if extra:
        name = min(extra)
        raise UnsupportedParameter(f"This engine does not know the parameter '{name}'. Leave it out.", param=name)
    if body.model is not None:
        front.check_model(body.model)
    return body


def _text_of(body: TokenizeBody, front: Front) -> str:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Send either 'prompt' or 'messages'.", param="prompt")
    if body.prompt is not None:
        return body.prompt
    assert body.messages is not None
    if body.add_special_tokens:
        words = "'add_special_tokens' is for a 'prompt': a conversation has those that its template writes."
        raise UnsupportedParameter(words, param="add_special_tokens")
    if not body.add_generation_prompt:
        words = "'add_generation_prompt' is true here: a conversation ends where the assistant's turn begins."
        raise UnsupportedParameter(words, param="add_generation_prompt")
    asked = ChatRequest(model=front.settings.served_model_name, messages=body.messages, tools=body.tools or None)
    tool_use = read_tools(asked, front.checkpoint)
    chat = front.checkpoint.chat
    effort = body.reasoning_effort if chat is not None and body.reasoning_effort in chat.efforts else None
    return render_chat(front.checkpoint, body.messages, tool_use.tools if tool_use is not None else (), effort)


def _decoded(codec: TextCodec, tokens: Sequence[int]) -> str:
    return b"".join(map(codec.label, tokens)).decode(errors="replace")


def _rendered(request_id: str, model: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Return what a request would be computed from."""
    return {"request_id": request_id, "model": model, "token_ids": tokens}


def _route(path: str, count: Count) -> HTTPRouteHandler:
    async def answer(request: Request[Any, Any, Any]) -> ASGIApp:
        return CountResponse(front_of(request), await request.body(), count, request_id_of(request))

    return post(path, status_code=200)(answer)


handlers = [
    _route("/tokenize", _tokens),
    _route("/detokenize", _text),
    _route("/v1/completions/render", _rendered_completion),
    _route("/v1/chat/completions/render", _rendered_chat),
]
