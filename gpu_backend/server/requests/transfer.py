# kv_transfer_params as vLLM's proxies for prefill and decode send them: an answer's go verbatim into the next request.

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gpu_backend.step.transfer import HeldBlocks, RemoteBlocks
from protocol.errors import invalid_param

NAME = "kv_transfer_params"
LONGEST = 256  # characters of a name or a host


class TransferParams(Struct, frozen=True, omit_defaults=True):
    """What is asked of the prompt's blocks. Fields of other engines that are not here mean nothing here."""

    do_remote_decode: bool = False  # another engine goes on: keep the prompt's blocks for it
    do_remote_prefill: bool = False  # another engine has them, if what follows says where
    remote_engine_id: str | None = None
    remote_request_id: str | None = None  # the lease
    remote_block_ids: Any = None  # of vLLM; here the lease says which
    remote_host: str | None = None
    remote_port: int | None = None
    remote_cached_tokens: int = 0  # of the prompt, which the other engine had not to compute

    @property
    def remote(self) -> RemoteBlocks | None:
        """Where the blocks are; None where that is not said as this engine says it: then the prompt is computed."""
        if not (self.do_remote_prefill and self.remote_engine_id and self.remote_request_id):
            return None
        if not (self.remote_host and self.remote_port):
            return None
        return RemoteBlocks(
            self.remote_engine_id, self.remote_request_id, self.remote_host, self.remote_port, self.remote_cached_tokens
        )


def check_transfer(params: TransferParams | None, num_prompts: int, role: str, *, streams: bool) -> None:
    """Raise ``BadRequest`` for what cannot be meant, or is no work of an engine of this role."""
    holds = params is not None and params.do_remote_decode
    if role == "prefill" and not holds:
        raise invalid_param(NAME, f"This engine computes prompts for others alone: send '{NAME}' to hold one's blocks.")
    if role == "decode" and holds:
        raise invalid_param(NAME, "This engine makes replies alone, and holds no blocks for others.")
    if params is None:
        return
    if num_prompts > 1:
        raise invalid_param(NAME, f"'{NAME}' is of one prompt: send one.")
    if params.do_remote_decode and params.do_remote_prefill:
        raise invalid_param(NAME, f"'{NAME}' asks to decode and to prefill elsewhere; one of them is done here.")
    if params.do_remote_decode and streams:
        raise invalid_param(NAME, f"'{NAME}' with 'do_remote_decode' is answered at once: leave out 'stream'.")
    names = (params.remote_engine_id, params.remote_request_id, params.remote_host)
    if any(len(name or "") > LONGEST for name in names):
        raise invalid_param(NAME, f"'{NAME}' has a name of more than {LONGEST} characters.")
    if params.remote_port is not None and not 0 <= params.remote_port < 2**16:
        raise invalid_param(NAME, f"'{NAME}' has the port {params.remote_port}; it is 1 to 65535.")
    if params.remote_cached_tokens < 0:
        raise invalid_param(
            NAME, f"'{NAME}' has {params.remote_cached_tokens} cached tokens; it is a number from 0 up."
        )


def as_params(held: HeldBlocks | None) -> dict[str, Any] | None:
    """Return what a request to the engine that goes on says; None where nothing is held, and it computes all."""
    if held is None:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": held.where.engine_id,
        "remote_request_id": held.where.lease,
        "remote_block_ids": held.block_ids,
        "remote_host": held.where.host,
        "remote_port": held.where.port,
        "remote_cached_tokens": held.where.cached_tokens,
        "tp_size": 1,
    }
