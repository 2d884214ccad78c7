# POST /v1/completions.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Request, post
from litestar.types import ASGIApp
from msgspec import UNSET

from gpu_backend.server.answers import Envelope, InferenceResponse
from gpu_backend.server.front import Front, front_of, request_id_of
from gpu_backend.server.generation import Job
from gpu_backend.server.reply import Piece
from gpu_backend.server.requests.bodies import Extensions, read_body, read_sender, sampling_of, stop_strings
from gpu_backend.server.requests.checks import check_completion, check_tokens
from gpu_backend.server.requests.prompts import encode_prompts, split_prompts
from gpu_backend.server.requests.structured import grammar_of
from gpu_backend.server.requests.transfer import check_transfer
from gpu_backend.server.wire import TextChoice, completion_logprobs, with_prompt
from protocol.completions import CompletionRequest
from protocol.errors import BadRequest, invalid_param
from protocol.serving.off_loop import off_loop

KIND = "text_completion"  # of whole answers and chunks alike
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions alone
MOST_REPLIES = 2048  # to all prompts of a request together


@post("/v1/completions", status_code=200)
async def create_completion(request: Request[Any, Any, Any]) -> ASGIApp:
    """Continue one prompt or several, whole or as a stream of chunks."""
    front = front_of(request)
    max_model_len = front.max_model_len
    raw = await request.body()
    body, extensions = await off_loop(len(raw), lambda: read_body(raw, CompletionRequest))
    adapter = front.check_model(body.model)
    check_completion(body, extensions)
    check_tokens(body, extensions, front.checkpoint.vocab_size)
    prompts = await encode_prompts(front.checkpoint, body.prompt, max_model_len, room_for_reply=1, param="prompt")
    if extensions.resume_token_ids and len(prompts) > 1:
        raise BadRequest("'resume_token_ids' continues one reply: send one prompt with it.", param="prompt")
    role = front.settings.engine.transfer.role
    check_transfer(extensions.kv_transfer_params, len(prompts), role, streams=bool(body.stream))
    if (replies := len(prompts) * (body.n or 1)) > MOST_REPLIES:
        message = f"'prompt' and 'n' ask for {replies} replies; one request asks for at most {MOST_REPLIES}."
        raise invalid_param("n", message)
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    grammar, grammar_field = grammar_of(body, extensions)
    job = Job(
        prompts=prompts,
        sampling=sampling_of(
            body,
            extensions,
            max_tokens=min(asked, max_model_len - min(map(len, prompts))),
            logprobs=body.logprobs,
            eos_token_ids=front.checkpoint.eos_token_ids,
            defaults=front.checkpoint.defaults,
            draw_seed=front.draw_seed,
            grammar=grammar,
        ),
        n=body.n or 1,
        sender=read_sender(request.headers),
        stops=stop_strings(body),
        resumed=extensions.resume_token_ids,
        skip=extensions.resume_text_chars,
        grammar_field=grammar_field,
        adapter=adapter,
        cache_salt=extensions.cache_salt,
        transfer=extensions.kv_transfer_params,
    )
    writer = CompletionAnswerWriter(front, body, extensions, prompts)
    return InferenceResponse(front, job, writer, request_id_of(request), streams=bool(body.stream))


class CompletionAnswerWriter:
    """Writes one call's replies as text completions."""

    def __init__(
        self, front: Front, body: CompletionRequest, extensions: Extensions, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        self._prompts = prompts
        self._n = body.n or 1
        self._codec = front.checkpoint.codec
        self.envelope = Envelope(front, body, "cmpl", whole=KIND, chunk=KIND)
        self._shows_logprobs = body.logprobs is not None
        self._shows_token_ids = extensions.return_token_ids
        self._shows_gpu_seconds = extensions.return_gpu_seconds and bool(body.stream)
        self._echoed = self._echoes(body) if body.echo else []  # one text per reply
        self._begun: set[int] = set()  # replies whose echo is out

    def choices(self, piece: Piece) -> list[TextChoice]:
        """Return what a piece says as one chunk, if it says anything that was asked for."""
        choice = self.whole_choice(piece)
        self._begun.add(piece.index)
        return [choice] if choice.text or choice.logprobs or choice.token_ids or choice.finish_reason else []

    def whole_choice(self, piece: Piece) -> TextChoice:
        """Return what a reply is, or a piece of it."""
        shows_echo = bool(self._echoed) and piece.index not in self._begun
        scores = None
        if self._shows_logprobs and (piece.scored or piece.prompt_scores is not None or piece.finish_reason):
            echoed = len(self._echoed[piece.index]) if self._echoed else 0
            scores = completion_logprobs(self._codec, piece.scored, echoed)
            if piece.prompt_scores is not None:
                scores = with_prompt(self._codec, self._prompts[piece.index // self._n], piece.prompt_scores, scores)
        return TextChoice(
            index=piece.index,
            text=self._echoed[piece.index] + piece.text if shows_echo else piece.text,
            logprobs=scores,
            finish_reason=piece.finish_reason.value if piece.finish_reason else None,
            token_ids=piece.token_ids if self._shows_token_ids else UNSET,
            gpu_seconds=round(piece.gpu_seconds, 9) if self._shows_gpu_seconds else UNSET,
        )

    def _echoes(self, body: CompletionRequest) -> Sequence[str]:
        texts = [p if isinstance(p, str) else self._codec.decode(p) for p in split_prompts(body.prompt)]
        return [text for text in texts for _ in range(body.n or 1)]


handlers = [create_completion]
