# Blocks of the KV cache that one engine computes and another reads: what of them crosses the engine.

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """Where another engine holds the blocks of a prompt, under which lease."""

    engine_id: str
    lease: str
    host: str
    port: int
    cached_tokens: int = 0  # of the prompt, that the other engine had not to compute


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks of a prompt that are kept for another engine, for as long as their lease lasts."""

    where: RemoteBlocks
    block_ids: tuple[int, ...]
