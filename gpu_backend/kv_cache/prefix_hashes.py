# The names that full KV blocks go by: hash chains over tokens, salted by tenant, so that no tenant finds another's;
# but for beginnings that the operator declares to be shared by all.

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

SHARED_SALT = b"shared by all"


def extend_hashes(
    hashes: list[bytes],
    token_ids: SequenceOf[int],
    block_size: int,
    salt: bytes,
    shared: frozenset[bytes] = frozenset(),
) -> None:
    """Append to ``hashes`` the hash of each full block of ``token_ids`` that has none yet.

    A block's hash covers the salt and every token up to its end. It is a cryptographic one (BLAKE2b, 128 bits): with a
    forged collision a tenant could read another's prompt. Leading blocks whose hash under the shared salt is in
    ``shared`` go by that one; the salt comes in with the first block that is not.
    """
    done = len(hashes)
    is_shared = not done or hashes[-1] in shared
    for start in range(done * block_size, len(token_ids) // block_size * block_size, block_size):
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        before = hashes[-1] if hashes else b""
        if is_shared and shared:
            block_hash = _hash(before or SHARED_SALT, tokens)
            if block_hash in shared:
                hashes.append(block_hash)
                continue
        hashes.append(_hash(before + salt if is_shared else before, tokens))
        is_shared = False


def shared_hashes(prefixes: Iterable[SequenceOf[int]], block_size: int) -> frozenset[bytes]:
    """Return the hashes of the full blocks of prompts' beginnings that all tenants may share."""
    found: set[bytes] = set()
    for token_ids in prefixes:
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, block_size, SHARED_SALT)
        found.update(hashes)
    return frozenset(found)


def _hash(before: bytes, tokens: bytes) -> bytes:
    digest = blake2b(before, digest_size=16)
    digest.update(tokens)
    return digest.digest()
