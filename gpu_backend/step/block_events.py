# What the prefix cache gains and loses, as the field's routers are told of it: an index of these events says which
# prompt has its beginning on which replica. They are vLLM's (vllm/distributed/kv_events.py).

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Medium = Literal["GPU", "CPU"]  # the device's memory, whatever it is, and the host's behind it


@dataclass(slots=True)
class BlockStored:
    """Blocks that follow one another can be found now. ``token_ids`` are those of all of them.

    ``extra_keys`` has an entry for each block: what beside its tokens, and those of the blocks before it, makes its
    hash. That is the tenant, as an opaque name, at the first block that is not shared by all.

    ``prompt_marks`` is ours, and left out where there are none: marks of prompts' beginnings, as gateways make them,
    and the hashes of the blocks that these end in. A mark that comes later than its block comes with no block.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: Medium
    extra_keys: list[tuple[str] | None]
    lora_id: int | None = None
    lora_name: str | None = None
    group_idx: int = 0
    prompt_marks: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class BlockRemoved:
    """Blocks can be found no more in this memory."""

    block_hashes: list[int]
    medium: Medium
    group_idx: int = 0


@dataclass(slots=True)
class AllBlocksCleared:
    """Nothing can be found: the engine has begun anew."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
