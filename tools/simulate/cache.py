# How much of a trace's prompts the prefix cache would have held: the real block manager alone, over a trace that tells
# which blocks are equal (Mooncake's). python -m tools.simulate.cache --trace FILE --blocks 1700

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.simulate.traces import read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, print a table, return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.simulate.cache", description="Replay a trace against the prefix cache."
    )
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="JSON lines with hash_ids, as Mooncake's")
    add("--blocks", type=int, nargs="+", required=True, metavar="N", help="capacities to try, in the trace's blocks")
    add("--host-blocks", type=int, default=0, metavar="N", help="blocks in host memory behind them")
    options = parser.parse_args(arguments)
    try:
        requests = prompts(options.trace)
    except (OSError, ValueError) as exc:
        parser.error(str(exc))
    if not any(requests):
        parser.error(f"{options.trace} does not tell which blocks are equal: it takes a trace with hash_ids")
    if (longest := max(map(len, requests))) > min(options.blocks):
        parser.error(f"a prompt of {options.trace} has {longest} blocks: so many are the least --blocks")
    print("blocks\tours\tLRU\tratio\tmicroseconds a block")
    for num_blocks in options.blocks:
        started = time.process_time()
        ours = share_found(requests, num_blocks, options.host_blocks)
        cost = (time.process_time() - started) / sum(map(len, requests)) * 1e6
        lru = share_found_by_lru(requests, num_blocks + options.host_blocks)
        ratio = ours / lru if lru else math.inf if ours else 1
        print(f"{num_blocks}\t{ours:.4f}\t{lru:.4f}\t{ratio:.2f}\t{cost:.2f}")
    return 0


def prompts(path: Path) -> list[tuple[bytes, ...]]:
    """Return the block hashes of each request's prompt, in the order of arrival."""
    return [tuple(id_.to_bytes(16, "little") for id_ in request.prefix) for request in read_trace(path)]


def share_found(requests: Iterable[Sequence[bytes]], num_blocks: int, num_host_blocks: int = 0) -> float:
    """Return the share of all prompt blocks that the block manager finds; each request ends before the next begins."""
    blocks = BlockManager(num_blocks, block_size=1, num_host_blocks=num_host_blocks)
    blocks.note_request("", 1.0)
    found = seen = 0
    for hashes in requests:
        allocation = blocks.allocate_table(hashes, len(hashes))
        assert allocation is not None, f"a prompt of {len(hashes)} blocks does not fit into {num_blocks}"
        for block, block_hash in zip(allocation.block_table, hashes, strict=True):
            blocks.publish(block, block_hash)
        blocks.release(allocation.block_table)
        blocks.take_copies()
        found += allocation.num_cached
        seen += len(hashes)
    return found / seen


def share_found_by_lru(requests: Iterable[Sequence[bytes]], num_blocks: int) -> float:
    """Return the same share with blocks evicted least recently used first, a prompt's end before its beginning."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    found = seen = 0
    for hashes in requests:
        for block_hash in hashes:
            if block_hash not in cache:
                break
            found += 1
        for block_hash in reversed(hashes):
            cache[block_hash] = None
            cache.move_to_end(block_hash)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
        seen += len(hashes)
    return found / seen


if __name__ == "__main__":
    sys.exit(main())
