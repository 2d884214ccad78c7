# What can be inferred: the one union of requests, those that are answered in words, those in dialects of their own,
# that of whole replies, and how many choices a reply has.

from __future__ import annotations

from protocol.chat import ChatReply, ChatRequest
from protocol.completions import CompletionReply, CompletionRequest
from protocol.embeddings import EmbeddingReply, EmbeddingRequest, RerankReply, RerankRequest
from protocol.media.audio import RealtimeRequest, SpeechRequest, TranscriptionReply, TranscriptionRequest
from protocol.media.images import ImageReply, ImageRequest
from protocol.messages import MessagesRequest
from protocol.responses import ResponsesRequest

Generation = ChatRequest | CompletionRequest  # answered in words, up to an output limit
MediaRequest = ImageRequest | SpeechRequest | TranscriptionRequest | RealtimeRequest
Request = Generation | EmbeddingRequest | RerankRequest | MediaRequest
NativeRequest = MessagesRequest | ResponsesRequest  # told as a chat to all but those who know the dialect
WholeReply = ChatReply | CompletionReply | EmbeddingReply | RerankReply | ImageReply | TranscriptionReply


def choices_asked(request: Request) -> int:
    """Return how many choices a whole reply has: ``n`` for each prompt."""
    prompts = getattr(request, "prompt", None)
    several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return (getattr(request, "n", None) or 1) * several
