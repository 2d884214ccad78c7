# What a request can use and cost at the most on a model, told without a tokenizer: what its hold covers.

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable

from msgspec.structs import replace

from billing.core.holds import Headroom
from billing.core.money import NanoDollars
from billing.core.prices import most_cost
from protocol.chat import ChatRequest, HostedTool
from protocol.completions import CompletionRequest
from protocol.embeddings import RerankRequest
from protocol.inference import Generation, Request
from protocol.media.audio import RealtimeRequest, SpeechRequest, TranscriptionRequest
from protocol.media.images import ImageEditRequest, ImageRequest
from protocol.usage import Usage
from router.catalog.targets import ModelSpec
from router.prompt_size.prompt_bounds import USUAL_TOKEN_BYTES, PromptBound, bound_prompt
from router.prompt_size.prompt_lengths import (
    byte_length,
    number_of_prompts,
    prompt_characters,
    prompt_tokens_least,
)

# What one call of an upstream's own tool, as a search of the web, adds to a prompt. No upstream names a bound: what
# such calls really add is charged in full.
SEARCH_TOKENS = 20_000
USUAL_IMAGE_TOKENS = 2_048  # of a large image in most models; nothing is held by it
# Text of any kind has more bytes to a token than this: base64 and digits about 2, prose 4. Nothing is held by it.
FEWEST_TOKEN_BYTES = 2

# The least output limit that a budget sets for a caller who named none: shorter answers would mostly be cut off (those
# of public chat traces have 211 tokens on average, one in ten over 500).
WORTHWHILE = 512
WORTHWHILE_THINKING = (
    4_096  # where a part of it is spent on that: by an effort that is asked, or by models that always do
)
THINKS = re.compile(r"o[1-9]|gpt-5(?!.*chat)|gemini-(?:2\.5|[3-9])|deepseek-r|.*(reason|think)", re.IGNORECASE)
# Of documents to rank: a query with up to a hundred of them is one search unit. Cohere cuts a document of more than 500
# tokens, those of the query among them, into pieces that each count as a document (https://cohere.com/pricing).
UNIT_DOCUMENTS = 100
PIECE_TOKENS = 500
LEAST_OF_DOCUMENT = 250  # tokens of a piece that a long query leaves to the document
# Of a square picture of GPT Image 1.5, by its quality; nothing is held by it.
PICTURE_TOKENS = {"low": 272, "medium": 1_056}
USUAL_PICTURE_TOKENS = 4_160
PARTIAL_TOKENS = 100  # of each picture that is shown before it is whole, as OpenAI bills it
# Of speech in a minute, about: tokens by OpenAI's prices ($12 a million, $0.015 a minute), characters as people read.
SPEECH_TOKENS = 1_250
SPEECH_CHARACTERS = 900
SPOKEN_TOKENS = 4  # of a second of a recording, in words
COMPLETION_LIMIT = 16  # of a completion whose caller names none: what OpenAI documents, and our own engine does


def output_tokens_most(request: Request, model: ModelSpec, prompt: PromptBound | None = None) -> int:
    """Return the most tokens that all replies together can have on ``model``.

    What the upstream is told, or what the context leaves: the least of them for each reply. ``prompt`` as in
    ``usage_most``.
    """
    if not isinstance(request, Generation):
        if not isinstance(request, ImageRequest | SpeechRequest | TranscriptionRequest):
            return 0
        most = model.max_output
        if isinstance(request, ImageRequest):
            most = (most + _partial_tokens(request)) * request.number
        return most if model.price.dearest_output else 0  # no upstream names a bound for these
    limit = output_limit(request, model, prompt)
    if limit is None:
        limit = model.context if isinstance(request, ChatRequest) else model.max_output
    room = model.context
    # The prompt takes from the room, where that can matter and where it is the only one.
    size = prompt_characters(request) if prompt is None else prompt.size  # neither is less than its tokens
    if limit > room - size and number_of_prompts(request) == 1:
        room -= prompt_tokens_least(request, enough=model.context)
    most = limit if limit < room else room
    return most * replies_asked(request) if most > 0 else 0


def output_limit(request: Request, model: ModelSpec, prompt: PromptBound | None = None) -> int | None:
    """Return the output limit that the upstream is told, in tokens for each reply; ``None``: none.

    The caller's, up to ``max_output``, or else the model's usual one: without one, an upstream that can say more would
    bill more than is held. A prompt that may leave no room for so much goes without: the context is its limit, and
    naming more than fits is refused by some upstreams. Completions go without, too: their limit is 16 where none is
    named.
    """
    if not isinstance(request, Generation):
        return None
    if (asked := request.output_limit) is not None:
        return asked if asked < model.max_output else model.max_output
    if isinstance(request, CompletionRequest):
        return None
    prompt = bound_prompt(request) if prompt is None else prompt
    return model.usual_output if _likely_most(prompt) + model.usual_output <= model.context else None


def worthwhile_limit(request: Request, models: Iterable[ModelSpec]) -> int:
    """Return the output limit below which a caller who named none is better refused than answered by ``models``."""
    if not isinstance(request, ChatRequest):
        return COMPLETION_LIMIT
    if request.reasoning_effort is None:
        thinks = any(THINKS.match(model.upstream_model.rpartition("/")[2]) for model in models)
    else:
        thinks = request.reasoning_effort not in ("none", "minimal")
    return WORTHWHILE_THINKING if thinks else WORTHWHILE


def limit_within(
    request: Request,
    models: Iterable[ModelSpec],
    headroom: Headroom,
    prompt: PromptBound,
    *,
    batch: bool = False,
    at: float | None = None,
) -> int:
    """Return the largest output limit with which the request fits into ``headroom`` on each of ``models``.

    At most what the largest of them can say; below 0 where the prompt alone does not fit. ``prompt`` as in
    ``usage_most``.
    """
    replies = replies_asked(request)

    def limit_on(model: ModelSpec) -> int:
        prompt_most, extra = input_tokens_most(request, model, prompt), requests_made(request, model) - 1
        units = hosted_most(request)

        def is_too_much(limit: int) -> bool:
            most = Usage(
                prompt_most,
                output_tokens=limit * replies,
                extra_requests=extra,
                audio_input_tokens=_heard_most(request, model, prompt, prompt_most, extra),
                audio_output_tokens=limit * replies if is_spoken(request) else 0,
                **units,
            )
            if headroom.tokens is not None and most.total_tokens > headroom.tokens:
                return True
            return headroom.nanousd is not None and most_cost(most, model.price, batch=batch, at=at) > headroom.nanousd

        return bisect_left(range(model.max_output + 1), True, key=is_too_much) - 1

    limits = [(limit_on(model), model.max_output) for model in models]
    # A model whose own limit fits lets others say more.
    return min((limit for limit, own in limits if limit < own), default=max((own for _, own in limits), default=0))


def with_output_limit(request: Request, limit: int | None) -> Request:
    """Return the request with another output limit, whatever it was called."""
    if not isinstance(request, Generation) or request.output_limit == limit:
        return request
    if isinstance(request, ChatRequest):
        return replace(request, max_tokens=None, max_completion_tokens=limit)
    return replace(request, max_tokens=limit)


def _likely_most(prompt: PromptBound) -> int:
    """Return about the most tokens of a prompt that is anything like language."""
    return prompt.size // FEWEST_TOKEN_BYTES + USUAL_IMAGE_TOKENS * len(prompt.images)


def replies_asked(request: Request) -> int:
    """Return how many replies the upstream makes and bills: ``n``, or ``best_of``, for each prompt; 0 without words."""
    match request:
        case ChatRequest():
            return max(1, request.n or 1)
        case CompletionRequest():
            return max(1, request.n or 1, request.best_of or 1) * number_of_prompts(request)
        case _:
            return 0


def requests_made(request: Request, model: ModelSpec) -> int:
    """Return how many requests the replies are asked for by, each of which has the whole prompt."""
    return replies_asked(request) if model.parallel_n and isinstance(request, ChatRequest) else 1


def input_tokens_most(request: Request, model: ModelSpec, prompt: PromptBound | None = None) -> int:
    """Return the most tokens of the prompt, or of all prompts: none is longer than the model's context.

    Where the upstream runs tools of its own, the model reads it anew after each call, and with it what it said and all
    that was found.
    """
    prompt = bound_prompt(request) if prompt is None else prompt
    if isinstance(request, ImageEditRequest):
        return prompt.tokens_on(model)  # pictures are no part of what is known of a context
    most = min(prompt.tokens_on(model), model.context * number_of_prompts(request))
    if calls := max((max(tool.most, tool.calls) for tool in _hosted(request)), default=0):
        each = max(SEARCH_TOKENS if tool.found is None else tool.found for tool in _hosted(request))
        said, found = output_tokens_most(request, model, prompt), each * calls * (calls + 1) // 2
        most = min((calls + 1) * (most + said) + found, (calls + 1) * model.context)
    return most * requests_made(request, model)


def _heard_most(request: Request, model: ModelSpec, prompt: PromptBound, most: int, extra: int) -> int:
    """Return how many tokens of a prompt of ``most`` may be of recordings: all, where tools have it read anew."""
    return most if _hosted(request) else min(most, prompt.heard_on(model) * (1 + extra))


def is_spoken(request: Request) -> bool:
    """Whether a chat is answered by voice."""
    return isinstance(request, ChatRequest) and request.modalities is not None


def hosted_most(request: Request) -> dict[str, int]:
    """Return how many of each unit the upstream's own tools may use for the request: each call may be of any of them,
    and run in a container of its own."""
    return {tool.unit: tool.most for tool in _hosted(request) if tool.unit}


def _hosted(request: Request) -> list[HostedTool]:
    tools = request.tools if isinstance(request, ChatRequest) else None
    return [tool for tool in tools if isinstance(tool, HostedTool)] if tools else []


def usage_most(request: Request, model: ModelSpec, prompt: PromptBound | None = None) -> Usage:
    """Return a usage that the request never exceeds on ``model``: what a hold covers.

    ``prompt`` is ``bound_prompt(request)``, for callers that have it already. What it costs at the most,
    ``billing.core.prices.most_cost`` tells.
    """
    if isinstance(request, RealtimeRequest):  # of each response; an upstream cuts off what its context has no room for
        said, spoken = model.context, model.max_output
        media = Usage(audio_input_tokens=said, image_input_tokens=said, audio_output_tokens=spoken)
        return replace(media, input_tokens=said, output_tokens=spoken)
    prompt = bound_prompt(request) if prompt is None else prompt
    prompt_most, extra = input_tokens_most(request, model, prompt), requests_made(request, model) - 1
    output_most = output_tokens_most(request, model, prompt)
    pieces = Usage(
        input_tokens=prompt_most,
        output_tokens=output_most,
        extra_requests=extra,
        search_units=_search_units(request, 1),
        images=_images(request),
        characters=_characters(request),
        audio_seconds=request.file.seconds_most if isinstance(request, TranscriptionRequest) else 0,
        audio_input_tokens=_heard_most(request, model, prompt, prompt_most, extra) if prompt.is_heard else 0,
        image_input_tokens=prompt.seen_on(model) if isinstance(request, ImageEditRequest) else 0,
        audio_output_tokens=output_most if is_spoken(request) else 0,
    )
    return replace(pieces, **units) if (units := hosted_most(request)) else pieces


def cost_most(
    request: Request, model: ModelSpec, prompt: PromptBound | None = None, *, batch: bool = False
) -> NanoDollars:
    """Return nano-dollars that the request never exceeds on ``model``, whenever it runs. ``prompt`` as in
    ``usage_most``."""
    return most_cost(usage_most(request, model, prompt), model.price, batch=batch)


def pieces_likely(request: Request) -> Usage:
    """Return about what a request without words in its answer uses beside its prompt."""
    images, characters = _images(request), _characters(request)
    each = PICTURE_TOKENS.get(getattr(request, "quality", None) or "", USUAL_PICTURE_TOKENS)
    tokens = images * (each + _partial_tokens(request)) + -(-characters * SPEECH_TOKENS // SPEECH_CHARACTERS)
    units = _search_units(request, USUAL_TOKEN_BYTES)
    seconds = request.file.seconds_likely if isinstance(request, TranscriptionRequest) else 0
    return Usage(
        output_tokens=tokens + seconds * SPOKEN_TOKENS,
        search_units=units,
        images=images,
        characters=characters,
        audio_seconds=seconds,
    )


def _images(request: Request) -> int:
    return request.number if isinstance(request, ImageRequest) else 0


def _partial_tokens(request: Request) -> int:
    return PARTIAL_TOKENS * (request.partial_images or 0) if isinstance(request, ImageRequest) else 0


def _characters(request: Request) -> int:
    return len(request.input) if isinstance(request, SpeechRequest) else 0


def _search_units(request: Request, token_bytes: int) -> int:
    """Return search units, where a token has so many bytes: with 1 they are the most that can be billed."""
    if not isinstance(request, RerankRequest):
        return 0
    room = max(LEAST_OF_DOCUMENT, PIECE_TOKENS - byte_length(request.query) // token_bytes) * token_bytes  # bytes
    pieces = sum(max(1, -(-byte_length(text) // room)) for text in request.texts)
    return -(-pieces // UNIT_DOCUMENTS)
