# Everything that is decided about an engine before it starts, in the parts that its users take. Plain values: the HTTP
# front end builds them and sends them to the engine's process, so nothing here imports torch.

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from gpu_backend.step.adapter import Adapter
from gpu_backend.step.cost import StepCost

DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("auto", "bfloat16", "float32")
ROLES = ("both", "prefill", "decode")
WAYS = ("tcp", "nixl")  # of KV blocks between engines
LOAD_FORMATS = ("auto", "dummy")
SPECULATIVE_METHODS = ("off", "ngram", "draft", "eagle3", "mtp")
HEADS = ("eagle3", "mtp")  # those that read what the model made of its tokens
OF_MODELS = ("draft", "eagle3")  # those that need a checkpoint of their own
MOST_SPECULATIVE_TOKENS = 16
QUANTIZATIONS = ("fp8", "int8", "w8a8", "int4")
KV_CACHE_DTYPES = ("auto", "fp8")
EVERYWHERE = ("0.0.0.0", "::", "*")  # as servers say that they listen at all addresses


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What is served."""

    model: str  # folder of a Hugging Face checkpoint
    tokenizer: str | None = None  # folder of another one's files; None: the checkpoint's own
    load_format: str = "auto"  # dummy: random weights of the config's shape
    quantization: str | None = None  # how weights are rounded while they are loaded; None: not at all
    max_model_len: int | None = None  # prompt and reply together; None: what the model and the KV cache allow

    def __post_init__(self) -> None:
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        _counts(self, "max_model_len")

    @property
    def folder(self) -> Path:
        """Where the checkpoint lies."""
        return Path(self.model)

    @property
    def tokenizer_folder(self) -> Path:
        """Where tokenizer.json lies."""
        return Path(self.tokenizer or self.model)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """On what it is computed, and how."""

    device: str = "auto"  # auto: cuda where there is one
    dtype: str = "auto"  # auto: bfloat16 on cuda, float32 on the CPU
    batch_invariant: bool = False  # bit-identical replies whatever else is in the batch
    tensor_parallel_size: int = 1  # processes that compute each layer together, each on a device of its own
    pipeline_parallel_size: int = 1  # stages that have some of the layers each: so many times as many processes
    ranks_meet_at: str | None = None  # HOST:PORT of the first, where another starts the others; None: it does itself
    enable_expert_parallel: bool = False  # of a mixture's experts each of these has some, rather than a part of all
    num_threads: int | None = None  # of torch on the CPU; None: torch's own choice
    cuda_graphs: bool | None = None  # replay decodes from graphs; None: on a GPU

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _counts(self, "tensor_parallel_size", "pipeline_parallel_size", "num_threads")
        address = self.ranks_meet_at or "HOST:1"
        is_address = bool(address.rpartition(":")[0]) and address.rpartition(":")[2].isdecimal()
        _is("HOST:PORT", "ranks_meet_at", address, is_address and (self.ranks_meet_at is None or self.num_ranks > 1))
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel shares a mixture's experts out among ranks, but tensor_parallel_size is 1; "
                "raise it, or leave enable_expert_parallel out"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much KV cache there is, and how its numbers are kept."""

    block_size: int = 16  # tokens in a KV block
    kv_cache_dtype: str = "auto"  # auto: that of the model; fp8: half the bytes, with a scale for each key head
    num_kv_blocks: int | None = None  # None: from the sizes below
    gpu_memory_share: float = 0.9  # of the device's memory, weights included
    cpu_kv_bytes: int = 256 * 1024 * 1024  # most for the CPU's KV cache
    host_kv_bytes: int = 0  # of host memory, for cached blocks that the device has no room for

    def __post_init__(self) -> None:
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _counts(self, "block_size", "num_kv_blocks", "cpu_kv_bytes")
        _is("a share between 0 and 1", "gpu_memory_share", self.gpu_memory_share, 0 < self.gpu_memory_share <= 1)
        _is("at least 0", "host_kv_bytes", self.host_kv_bytes, self.host_kv_bytes >= 0)


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """Which prompts find each other's blocks."""

    prefix_caching: bool = True  # False: only the replies of one request share blocks
    protected_cache_share: float = 0.25  # of the KV blocks: what tenants have cached there, no other's work takes
    shared_prefixes: tuple[tuple[int, ...], ...] = ()  # token ids of prompts' beginnings that all tenants may share

    def __post_init__(self) -> None:
        share = self.protected_cache_share
        _is("a share between 0 and 1", "protected_cache_share", share, 0 <= share <= 1)


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Whether and where it is told what the prefix cache has, in the names of vLLM's ``--kv-events-config``."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"  # to bind; subscribers connect
    replay_endpoint: str | None = None  # where the last batches are told again; None: nowhere
    buffer_steps: int = 10_000  # batches that are kept to be told again
    hwm: int = 100_000  # batches that wait for a slow subscriber, beyond which it misses some
    max_queue_size: int = 100_000  # batches that wait to be sent at all
    topic: str = ""

    def __post_init__(self) -> None:
        _one_of("publisher", self.publisher, ("zmq", "null"))
        _counts(self, "buffer_steps", "hwm", "max_queue_size")
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            is_address = address is None or address.startswith(("tcp://", "ipc://", "inproc://"))
            _is("an address such as tcp://127.0.0.1:5557", name, address, is_address)

    @property
    def publishes(self) -> bool:
        """Whether anything is told."""
        return self.enable_kv_cache_events and self.publisher != "null"


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Whether blocks of the KV cache are exchanged with other engines, and where they read those of this one."""

    kv_transfer_address: str | None = None  # HOST:PORT to listen on, by which others reach it; None: none are exchanged
    kv_transfer_secret: str = field(default="", repr=False)  # the engines' own, by which they know each other
    kv_transfer_by: str = "tcp"  # one of WAYS; tcp: through shared memory on one machine
    kv_pull_seconds: float = 5.0  # after which what has not come is computed
    role: str = "both"  # one of ROLES: whether it computes prompts for others alone, or replies alone

    def __post_init__(self) -> None:
        address = self.kv_transfer_address
        _is(f"one of {', '.join(ROLES)}", "role", self.role, self.role in ROLES)
        _one_of("kv_transfer_by", self.kv_transfer_by, WAYS)
        can = self.role == "both" or address is not None
        _is("both, without kv_transfer_address: no blocks are exchanged", "role", self.role, can)
        if address is not None:
            host, _, port = address.rpartition(":")
            is_address = bool(host) and port.isascii() and port.isdigit() and int(port) < 2**16
            _is("HOST:PORT, with the port 0 for any free one", "kv_transfer_address", address, is_address)
            reaches = host.strip("[]") not in EVERYWHERE  # others would look for the blocks on their own machine
            _is("an address by which others reach this engine", "kv_transfer_address", address, reaches)
        seconds = self.kv_pull_seconds
        _is("a number of seconds above 0, at most 20", "kv_pull_seconds", seconds, 0 < seconds <= 20)

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Where to listen; an IPv6 address loses its brackets."""
        host, _, port = (self.kv_transfer_address or "").rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class StepConfig:
    """How much one step computes, and what it takes."""

    max_num_batched_tokens: int = 2048  # tokens that one step computes, all sequences together
    max_num_seqs: int = 256  # sequences that run at once
    max_batch_tier_tokens: int | None = None  # tokens of prompts and replies of batch work in one step; None: all
    step_stretch: float = 1.5  # a step with prompts in it over its decodes alone, at most, where ``step_cost`` is known
    step_cost: StepCost | None = None  # what a step takes on this device; None: nothing is predicted
    measures_step_cost: bool = True  # at the start, where there is no ``step_cost``; it takes some seconds
    async_scheduling: bool | None = None  # launch a step before the last one's tokens are known; None: on a GPU

    def __post_init__(self) -> None:
        _counts(self, "max_num_batched_tokens", "max_num_seqs", "max_batch_tier_tokens")
        _is("at least 1", "step_stretch", self.step_stretch, self.step_stretch >= 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}); "
                "each running sequence takes one token of every step, so raise the first or lower the second"
            )


@dataclass(frozen=True, slots=True)
class FairnessConfig:
    """How long requests wait for others."""

    max_waiting: int = 4096  # requests of a tier in the queue; one tenant's are at most as many as still fit
    interactive_headroom: float = 0.1  # of the KV blocks: batch work is not let into them
    cached_lead: int | None = None  # tokens of service a tenant may be ahead and go next; None: max_num_batched_tokens
    batch_patience: float = 30.0  # seconds without a batch admission, after which interactive work lets one pass
    interactive_patience: float = 2.0  # seconds, after which the tenant that holds most gives up a reply's place

    def __post_init__(self) -> None:
        _counts(self, "max_waiting")
        headroom, lead, patience = self.interactive_headroom, self.cached_lead, self.interactive_patience
        _is("a share, at least 0 and less than 1", "interactive_headroom", headroom, 0 <= headroom < 1)
        _is("a number of tokens from 0 up", "cached_lead", lead, lead is None or lead >= 0)
        _is("a number of seconds from 0 up", "batch_patience", self.batch_patience, self.batch_patience >= 0)
        _is("a number of seconds above 0, inf for never", "interactive_patience", patience, patience > 0)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Where draft tokens come from."""

    speculative_method: str = "off"  # ngram: the tokens that followed the same text before are drafted and verified
    # draft: folder of a smaller checkpoint with the same tokenizer; eagle3: of a head that was trained for this model.
    speculative_model: str | None = None
    num_speculative_tokens: int = 4  # drafts for one sequence in one step, at most

    def __post_init__(self) -> None:
        _one_of("speculative_method", self.speculative_method, SPECULATIVE_METHODS)
        if (self.speculative_method in OF_MODELS) != (self.speculative_model is not None):
            raise ValueError(
                f"speculative_method is {self.speculative_method!r} and speculative_model {self.speculative_model!r}; "
                "the methods draft and eagle3, and no others, need a model"
            )
        drafts, most = self.num_speculative_tokens, MOST_SPECULATIVE_TOKENS
        _is(f"1 to {most}", "num_speculative_tokens", drafts, 1 <= drafts <= most)

    @property
    def has_model(self) -> bool:
        """Whether a second model drafts, or a head of the model's own."""
        return self.speculative_method not in ("off", "ngram")

    @property
    def has_head(self) -> bool:
        """Whether a head drafts, which reads what the model made of its tokens."""
        return self.speculative_method in HEADS


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Which adapters the model has, in the names of vLLM's flags."""

    lora_modules: tuple[Adapter, ...] = ()
    max_loras: int | None = None  # that the device has room for at once; None: for as many as there are, or one
    max_lora_rank: int = 16  # for which each has room
    allow_runtime_lora_updating: bool = False  # clients may load and unload adapters

    def __post_init__(self) -> None:
        _counts(self, "max_loras", "max_lora_rank")
        names = [adapter.name for adapter in self.lora_modules]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"lora_modules has {', '.join(sorted(twice))} twice; each name is one adapter's")
        if len(names) > self.num_slots:
            raise ValueError(
                f"lora_modules are {len(names)} and max_loras is {self.max_loras}; the device holds them all"
            )

    @property
    def num_slots(self) -> int:
        """Adapters that the device has room for; 0: the model has none, and none can be loaded."""
        if not (self.lora_modules or self.allow_runtime_lora_updating):
            return 0
        return self.max_loras or max(1, len(self.lora_modules))


@dataclass(frozen=True, slots=True)
class PicturesConfig:
    """How many pictures a request may bring to a model that reads some, and how large."""

    max_images: int = 16  # 0: none, and the model's tower is not loaded
    max_image_pixels: int = 2**25  # of one, before it is made smaller: it takes three bytes for each
    max_image_bytes: int = 20 * 2**20  # of one, as it comes

    def __post_init__(self) -> None:
        _is("at least 0", "max_images", self.max_images, self.max_images >= 0)
        _counts(self, "max_image_pixels", "max_image_bytes")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine serves, on what, and how much at once. Its parts refuse what cannot work with ``ValueError``."""

    checkpoint: CheckpointConfig
    device: DeviceConfig
    cache: CacheConfig
    prefixes: PrefixConfig
    steps: StepConfig
    fairness: FairnessConfig
    speculation: SpeculationConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    pictures: PicturesConfig = field(default_factory=PicturesConfig)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)

    def __post_init__(self) -> None:
        if self.lora.num_slots and self.device.num_ranks > 1:
            raise ValueError(
                "LoRA adapters are computed by one process; leave out lora_modules and allow_runtime_lora_updating, "
                "or tensor_parallel_size and pipeline_parallel_size"
            )
        if self.transfer.kv_transfer_address is not None and self.device.num_ranks > 1:
            raise ValueError(
                "KV blocks are exchanged by engines of one process; leave out kv_transfer_address, or "
                "tensor_parallel_size and pipeline_parallel_size"
            )
        if self.speculation.speculative_method == "eagle3" and self.device.pipeline_parallel_size > 1:
            raise ValueError(
                "an EAGLE-3 head reads layers that lie in several stages; leave out pipeline_parallel_size, or take "
                f"another speculative_method: {', '.join(name for name in SPECULATIVE_METHODS if name != 'eagle3')}"
            )
        if self.transfer.kv_transfer_address is not None and not self.prefixes.prefix_caching:
            raise ValueError("KV blocks that come from other engines are found by their prefix: prefix_caching is off")

    @property
    def cached_lead_tokens(self) -> int:
        """How far above the lowest counter a tenant may stand and go next for what of its prompts is cached."""
        if not self.prefixes.prefix_caching:
            return 0
        lead = self.fairness.cached_lead
        return self.steps.max_num_batched_tokens if lead is None else lead


PARTS: tuple[Any, ...] = tuple(get_type_hints(EngineConfig).values())[:-1]  # whose settings have names of their own


def engine_config(model: str, **settings: Any) -> EngineConfig:
    """Put settings, each by its own name, into the parts that have them."""
    parts: list[Any] = [
        kind(**{f.name: settings.pop(f.name) for f in fields(kind) if f.name in settings}) for kind in PARTS[1:]
    ]
    return EngineConfig(CheckpointConfig(model, **settings), *parts)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it is one of {', '.join(allowed)}")


def _counts(part: object, *names: str) -> None:
    """Hold settings to 1 or more, or None where that has a meaning."""
    for name in names:
        value = getattr(part, name)
        _is("at least 1", name, value, value is None or value >= 1)


def _is(bound: str, name: str, value: object, is_met: bool) -> None:
    if not is_met:
        raise ValueError(f"{name} is {value}; it is {bound}")
