# POST /v1/chat/completions.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from litestar import Request, post
from litestar.types import ASGIApp
from msgspec import UNSET
from msgspec.structs import replace

from gpu_backend.server.answers import Envelope, InferenceResponse
from gpu_backend.server.checkpoint.harmony import FINAL, HarmonyDetokenizer, HarmonyReader
from gpu_backend.server.checkpoint.tool_calls import ParsedText, ToolCallReader, join_parsed
from gpu_backend.server.front import Front, front_of, request_id_of
from gpu_backend.server.generation import Job
from gpu_backend.server.reply import Piece
from gpu_backend.server.requests.bodies import Extensions, read_body, read_sender, sampling_of, stop_strings
from gpu_backend.server.requests.checks import check_chat, check_tokens
from gpu_backend.server.requests.pictures import find_pictures, place_pictures, read_pictures
from gpu_backend.server.requests.prompts import encode_chat, render_chat
from gpu_backend.server.requests.structured import grammar_of
from gpu_backend.server.requests.tools import ToolUse, read_tools
from gpu_backend.server.requests.transfer import check_transfer
from gpu_backend.server.wire import (
    ChatChoice,
    ChatDelta,
    ChatMessage,
    ChunkChoice,
    call_bodies,
    chat_logprobs,
)
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.messages import FinishReason
from gpu_backend.step.picture import Picture
from gpu_backend.step.sampling_params import Grammar
from protocol.chat import ChatRequest
from protocol.errors import invalid_param
from protocol.serving.off_loop import off_loop


@post("/v1/chat/completions", status_code=200)
async def create_chat_completion(request: Request[Any, Any, Any]) -> ASGIApp:
    """Answer the last turn of a conversation, whole or as a stream of chunks."""
    front = front_of(request)
    max_model_len = front.max_model_len
    raw = await request.body()
    asked = await off_loop(len(raw), lambda: read_chat(front, raw))
    body, extensions, tool_use = asked.body, asked.extensions, asked.tool_use
    sender = read_sender(request.headers)
    prompt, pictures = await encode_prompt(front, asked, sender.tenant)
    is_harmony = front.checkpoint.chat is not None and front.checkpoint.chat.is_harmony
    job = Job(
        prompts=(prompt,),
        pictures=pictures,
        sampling=sampling_of(
            body,
            extensions,
            max_tokens=min(body.output_limit or max_model_len, max_model_len - len(prompt)),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            eos_token_ids=front.checkpoint.eos_token_ids,
            defaults=front.checkpoint.defaults,
            draw_seed=front.draw_seed,
            grammar=asked.grammar,
        ),
        n=body.n or 1,
        sender=sender,
        stops=stop_strings(body) + (tool_use.stops if tool_use is not None else ()),
        resumed=extensions.resume_token_ids,
        # Where tools may be called, the text passes through their reader whole, and the writer skips.
        skip=extensions.resume_text_chars if tool_use is None and not is_harmony else 0,
        grammar_field=asked.grammar_field,
        adapter=asked.adapter,
        new_detokenizer=partial(HarmonyDetokenizer, front.checkpoint.codec, in_answer=asked.grammar is not None)
        if is_harmony
        else None,
        cache_salt=extensions.cache_salt,
        transfer=extensions.kv_transfer_params,
    )
    writer = ChatAnswerWriter(front, body, extensions, tool_use, is_harmony=is_harmony)
    return InferenceResponse(front, job, writer, request_id_of(request), streams=bool(body.stream))


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A body that is understood."""

    body: ChatRequest
    extensions: Extensions
    text: str  # of the prompt
    pictures: tuple[tuple[str, str], ...]  # where in the body each is, and its URL
    tool_use: ToolUse | None
    grammar: Grammar | None
    grammar_field: str | None
    adapter: Adapter | None


def read_chat(front: Front, raw: bytes) -> ChatJob:
    """Decode and check a body, and render its prompt. Raises ``BadRequest`` and its kin."""
    checkpoint = front.checkpoint
    body, extensions = read_body(raw, ChatRequest)
    adapter = front.check_model(body.model)
    chat = checkpoint.chat
    check_chat(body, extensions, chat.efforts if chat is not None else ())
    check_tokens(body, extensions, checkpoint.vocab_size)
    role = front.settings.engine.transfer.role
    check_transfer(extensions.kv_transfer_params, 1, role, streams=bool(body.stream))
    grammar, grammar_field = grammar_of(body, extensions)
    answer = grammar if grammar_field == "response_format" else None
    tool_use = read_tools(body, checkpoint, answer)
    if tool_use is not None and tool_use.grammar is not None:
        if grammar is not answer:
            message = f"'{grammar_field}' says what the reply looks like, 'tool_choice' that it is a call. Send one."
            raise invalid_param("tool_choice", message)
        grammar = tool_use.grammar
        if body.tool_choice not in (None, "auto"):
            grammar_field = "tools"
    effort = body.reasoning_effort if body.reasoning_effort != "none" else None
    text = render_chat(checkpoint, body.messages, tool_use.tools if tool_use is not None else (), effort)
    if chat is not None and chat.is_harmony and grammar is not None:
        text += FINAL  # a grammar is the answer's: there are no thoughts before it
    pictures = find_pictures(body.messages, front.settings.engine.pictures)
    return ChatJob(body, extensions, text, pictures, tool_use, grammar, grammar_field, adapter)


async def encode_prompt(front: Front, asked: ChatJob, tenant: str) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Return a prompt's tokens, and the pictures among them. Raises ``BadRequest``."""
    tokens = await encode_chat(front.checkpoint, asked.text, front.max_model_len)
    return await with_pictures(front, tokens, asked.pictures, tenant, front.max_model_len - 1)


async def with_pictures(
    front: Front, tokens: tuple[int, ...], found: Sequence[tuple[str, str]], tenant: str, most: int
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Return a prompt of at most ``most`` tokens with those of the pictures that were found in its messages.

    Raises ``BadRequest``.
    """
    sight = front.checkpoint.sight
    if not found:
        return tokens, ()
    assert sight is not None, "the template refuses pictures where the model reads none"
    pixels = await read_pictures(found, sight.vision, front.settings.engine.pictures)
    size = sum(len(each.data) for each in pixels)
    return await off_loop(size, lambda: place_pictures(tokens, pixels, sight, tenant, most))


class ChatAnswerWriter:
    """Writes one call's replies as chat completions."""

    def __init__(
        self,
        front: Front,
        body: ChatRequest,
        extensions: Extensions,
        tool_use: ToolUse | None = None,
        *,
        is_harmony: bool = False,
    ) -> None:
        self._codec = front.checkpoint.codec
        self.envelope = Envelope(front, body, "chatcmpl", whole="chat.completion", chunk="chat.completion.chunk")
        self._shows_logprobs = bool(body.logprobs)
        self._shows_token_ids = extensions.return_token_ids
        self._shows_gpu_seconds = extensions.return_gpu_seconds
        self._begun: set[int] = set()  # replies whose role is out
        self._tool_use = tool_use
        self._is_harmony = is_harmony
        # By reply, where tools may be called or thoughts told.
        self._readers: dict[int, ToolCallReader | HarmonyReader] = {}
        self._skip = extensions.resume_text_chars  # characters of content that a resumed reply's reader has
        self._new_id = front.new_id

    def choices(self, piece: Piece) -> list[ChunkChoice]:
        """Return the role before a reply's first piece, then what it says, then its end.

        A piece without words, as the one with the end token is, has no chunk but that of the end.
        """
        choices: list[ChunkChoice] = []
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            # As OpenAI has it: an empty text begins a text, null a reply that may be calls.
            role = ChatDelta(role="assistant", content="" if self._tool_use is None else None)
            choices.append(ChunkChoice(index=piece.index, delta=role))
        parsed = self._read(piece)
        choice = ChunkChoice(
            index=piece.index,
            delta=ChatDelta(
                content=parsed.content or UNSET,
                tool_calls=call_bodies(parsed.calls, streamed=True),
                reasoning_content=parsed.reasoning or UNSET,
            ),
            logprobs=chat_logprobs(self._codec, piece.scored) if piece.scored else None,
            token_ids=piece.token_ids if self._shows_token_ids else UNSET,
            gpu_seconds=round(piece.gpu_seconds, 9) if self._shows_gpu_seconds else UNSET,
        )
        if parsed.content or parsed.calls or parsed.reasoning or piece.scored:
            choices.append(choice)
            choice = ChunkChoice(index=piece.index, delta=ChatDelta())
        if piece.finish_reason is not None:
            choices.append(replace(choice, finish_reason=self._reason(piece)))
        elif choice.token_ids:  # of a character that is not whole yet
            choices.append(choice)
        return choices

    def whole_choice(self, reply: Piece) -> ChatChoice:
        """Return what a reply is in a plain answer."""
        parsed = self._read(reply)
        return ChatChoice(
            index=reply.index,
            message=ChatMessage(
                None if parsed.calls and not parsed.content else parsed.content,
                tool_calls=call_bodies(parsed.calls, streamed=False),
                reasoning_content=parsed.reasoning or UNSET,
            ),
            logprobs=chat_logprobs(self._codec, reply.scored) if self._shows_logprobs else None,
            finish_reason=self._reason(reply),
            token_ids=reply.token_ids if self._shows_token_ids else UNSET,
        )

    def _read(self, piece: Piece) -> ParsedText:
        """Return the content and the calls in a piece's text."""
        if self._tool_use is None and not self._is_harmony:
            return ParsedText(piece.text)
        reader = self._readers.get(piece.index)
        if reader is None:
            reader = self._readers[piece.index] = self._new_reader(self._tool_use)
        parsed = reader.feed(piece.text)
        if piece.finish_reason is not None:
            parsed = join_parsed(parsed, reader.finish())
        skipped = min(self._skip, len(parsed.content))
        self._skip -= skipped
        parsed.content = parsed.content[skipped:]
        return parsed

    def _new_reader(self, use: ToolUse | None) -> ToolCallReader | HarmonyReader:
        def new_id() -> str:
            return f"call_{self._new_id()[:24]}"

        most = 1 if use is not None and use.has_one_call else None
        if self._is_harmony:
            return HarmonyReader(use.names if use is not None else (), new_id, most)
        assert use is not None, "other models have a reader where tools may be called"
        return ToolCallReader(use.style, use.names, new_id, most)

    def _reason(self, piece: Piece) -> str:
        """Return why a reply ended; a model that made calls waits for their results."""
        reader = self._readers.get(piece.index)
        has_called = reader is not None and reader.num_calls > 0
        return "tool_calls" if has_called and piece.finish_reason is FinishReason.STOP else str(piece.finish_reason)


handlers = [create_chat_completion]
