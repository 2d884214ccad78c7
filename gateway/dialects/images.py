# Pictures in OpenAI's shapes: what is checked of a request, and how its reply is written.

from __future__ import annotations

from typing import Any

import msgspec

from billing.core.money import to_text
from gateway.dialects.checks import check_tags, require, require_between
from gateway.dialects.endpoint import ApiEndpoint, ReplyFacts, WholeWriter
from protocol.completions import CompletionRequest
from protocol.inference import WholeReply
from protocol.media.images import MOST_IMAGES, ImageReply, ImageRequest
from protocol.usage import Usage

LONGEST_PROMPT = 32_000  # characters, as OpenAI has it


def check_images(request: ImageRequest) -> None:
    """Refuse what the types let through and OpenAI's API does not, and what comes in pieces. Raises BadRequest."""
    require(request.prompt != "", "prompt", "'prompt' must not be empty.")
    is_short = len(request.prompt) <= LONGEST_PROMPT
    require(is_short, "prompt", f"'prompt' may have at most {LONGEST_PROMPT} characters.")
    require_between(request.n, 1, MOST_IMAGES, "n")
    require_between(request.output_compression, 0, 100, "output_compression")
    require(not request.stream, "stream", "Pictures come whole here: leave 'stream' out.")
    require(not request.partial_images, "partial_images", "Pictures come whole here: leave 'partial_images' out.")
    check_tags(request)


class ImageWriter(WholeWriter):
    """Writes pictures."""

    def __init__(self, request: ImageRequest, request_id: str, created: int) -> None:
        self._created = created

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return the pictures, what the upstream says of them, and what they cost."""
        assert isinstance(whole, ImageReply)
        told: dict[str, Any] = msgspec.structs.asdict(whole)
        return msgspec.json.encode(
            {
                "created": self._created,
                "data": told.pop("images"),
                **{name: value for name, value in told.items() if value is not None},
                "model_used": reply.target.model.name,
                "usage": {
                    "input_tokens": usage.input_tokens,
                    "input_tokens_details": {"text_tokens": usage.input_tokens, "image_tokens": 0},
                    "output_tokens": usage.output_tokens,
                    "total_tokens": usage.total_tokens,
                    "cost_usd": to_text(reply.record.cost_nanousd),
                },
            }
        )


ENDPOINT = ApiEndpoint(
    path="/v1/images/generations",
    name="images",
    operation="create_image",
    summary="Make pictures",
    description="Return pictures of what the prompt says, in base64 or where they lie.",
    body_type=ImageRequest,
    check=check_images,
    writer=ImageWriter,
    is_for_batches=False,
    route_field="prompt",
    route_signs=frozenset({*ImageRequest.__struct_fields__} - {*CompletionRequest.__struct_fields__}),
)
