# What a router makes of KV events: which blocks can be found where, and what they hold.

from __future__ import annotations

from collections import defaultdict
from typing import Any

Tokens = tuple[int, ...]


class KvIndex:
    """Follows the events of one replica, and asserts that each fits to those before it."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, tuple[int | None, Tokens]]] = defaultdict(dict)  # by medium, then hash
        self.owners: dict[int, str] = {}  # of the first blocks that are not shared by all

    def apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "AllBlocksCleared":
                self.blocks.clear()
            case "BlockRemoved":
                for number in event["block_hashes"]:
                    del self.blocks[event["medium"]][number]
            case "BlockStored":
                size, parent = event["block_size"], event["parent_block_hash"]
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                for place, number in enumerate(event["block_hashes"]):
                    tokens = tuple(event["token_ids"][place * size : (place + 1) * size])
                    assert number not in self.blocks[event["medium"]], "a block is stored twice"
                    self.blocks[event["medium"]][number] = (parent, tokens)
                    if (keys := event["extra_keys"][place]) is not None:
                        (self.owners[number],) = keys
                    parent = number
            case other:
                raise AssertionError(f"an event of type {other}")

    def prompts(self) -> set[Tokens]:
        """Return the tokens from a first block on, of all blocks whose beginning is known, in whatever memory."""
        known = {number: what for blocks in self.blocks.values() for number, what in blocks.items()}
        found = set()
        for number in known:
            tokens: Tokens = ()
            at: int | None = number
            while at is not None and at in known:
                at, own = known[at]
                tokens = own + tokens
            if at is None:
                found.add(tokens)
        return found
