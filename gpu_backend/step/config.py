# Everything that is decided about an engine before it starts. Plain values: the HTTP front end builds one of these and
# sends it to the engine's process, so nothing here imports torch.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_backend.step.cost import StepCost

DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("auto", "bfloat16", "float32")
LOAD_FORMATS = ("auto", "dummy")
SPECULATIVE_METHODS = ("off", "ngram", "draft")
MOST_SPECULATIVE_TOKENS = 16
QUANTIZATIONS = ("fp8", "int8", "w8a8", "int4")
KV_CACHE_DTYPES = ("auto", "fp8")
COUNTS = (  # settings of 1 or more, or None where that has a meaning
    *("max_num_batched_tokens", "max_num_seqs", "block_size", "cpu_kv_bytes", "tensor_parallel_size"),
    *("pipeline_parallel_size", "max_model_len", "num_kv_blocks", "num_threads"),
    *("max_batch_tier_tokens", "max_waiting"),
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine serves, on what, and how much at once. Raises ``ValueError`` for settings that cannot work."""

    model: str  # folder of a Hugging Face checkpoint
    device: str = "auto"  # auto: cuda where there is one
    dtype: str = "auto"  # auto: bfloat16 on cuda, float32 on the CPU
    max_num_batched_tokens: int = 2048  # tokens that one step computes, all sequences together
    max_num_seqs: int = 256  # sequences that run at once
    max_model_len: int | None = None  # prompt and reply together; None: what the model and the KV cache allow
    quantization: str | None = None  # how weights are rounded while they are loaded; None: not at all
    kv_cache_dtype: str = "auto"  # auto: that of the model; fp8: half the bytes, with a scale for each key head
    batch_invariant: bool = False  # bit-identical replies whatever else is in the batch
    tensor_parallel_size: int = 1  # processes that compute each layer together, each on a device of its own
    pipeline_parallel_size: int = 1  # stages that have some of the layers each: so many times as many processes
    block_size: int = 16  # tokens in a KV block
    load_format: str = "auto"  # dummy: random weights of the config's shape
    tokenizer: str | None = None  # folder of another one's files; None: the checkpoint's own
    num_kv_blocks: int | None = None  # None: from the two sizes below
    gpu_memory_share: float = 0.9  # of the device's memory, weights included
    host_kv_bytes: int = 0  # of host memory, for cached blocks that the device has no room for
    cpu_kv_bytes: int = 256 * 1024 * 1024  # most for the CPU's KV cache; copies of decodes take up to half more
    max_batch_tier_tokens: int | None = None  # tokens of prompts and replies of batch work in one step; None: all
    max_waiting: int = 4096  # requests of a tier in the queue; one tenant's are at most as many as still fit
    interactive_headroom: float = 0.1  # of the KV blocks: batch work is not let into them
    step_stretch: float = 1.5  # a step with prompts in it over its decodes alone, at most, where ``step_cost`` is known
    step_cost: StepCost | None = None  # what a step takes on this device; None: nothing is predicted
    measures_step_cost: bool = False  # at the start, which takes some seconds, in place of ``step_cost``
    cached_lead: int | None = None  # tokens of service a tenant may be ahead and go next; None: max_num_batched_tokens
    batch_patience: float = 30.0  # seconds without a batch admission, after which interactive work lets one pass
    interactive_patience: float = 2.0  # seconds, after which the tenant that holds most gives up a reply's place
    prefix_caching: bool = True  # False: only the replies of one request share blocks
    protected_cache_share: float = 0.25  # of the KV blocks: what tenants have cached there, no other's work takes
    shared_prefixes: tuple[tuple[int, ...], ...] = ()  # token ids of prompts' beginnings that all tenants may share
    speculative_method: str = "off"  # ngram: the tokens that followed the same text before are drafted and verified
    speculative_model: str | None = None  # draft: folder of a smaller checkpoint with the same tokenizer, which drafts
    num_speculative_tokens: int = 4  # drafts for one sequence in one step, at most
    num_threads: int | None = None  # of torch on the CPU; None: torch's own choice
    cuda_graphs: bool | None = None  # replay decodes from graphs; None: on a GPU
    async_scheduling: bool | None = None  # launch a step before the last one's tokens are known; None: on a GPU

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("speculative_method", self.speculative_method, SPECULATIVE_METHODS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        if (self.speculative_method == "draft") != (self.speculative_model is not None):
            raise ValueError(
                f"speculative_method is {self.speculative_method!r} and speculative_model {self.speculative_model!r}; "
                "the method draft, and no other, needs a model"
            )
        for name in COUNTS:
            _is("at least 1", name, getattr(self, name), getattr(self, name) is None or getattr(self, name) >= 1)
        for name, is_met, bound in self._bounds():
            _is(bound, name, getattr(self, name), is_met)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}); "
                "each running sequence takes one token of every step, so raise the first or lower the second"
            )

    def _bounds(self) -> tuple[tuple[str, bool, str], ...]:
        """Return each setting that has bounds of its own, whether it keeps them, and what it may be."""
        drafts, lead = self.num_speculative_tokens, self.cached_lead
        return (
            ("num_speculative_tokens", 1 <= drafts <= MOST_SPECULATIVE_TOKENS, f"1 to {MOST_SPECULATIVE_TOKENS}"),
            ("interactive_headroom", 0 <= self.interactive_headroom < 1, "a share, at least 0 and less than 1"),
            ("cached_lead", lead is None or lead >= 0, "a number of tokens from 0 up"),
            ("step_stretch", self.step_stretch >= 1, "at least 1"),
            ("batch_patience", self.batch_patience >= 0, "a number of seconds from 0 up"),
            ("interactive_patience", self.interactive_patience > 0, "a number of seconds above 0, inf for never"),
            ("gpu_memory_share", 0 < self.gpu_memory_share <= 1, "a share between 0 and 1"),
            ("host_kv_bytes", self.host_kv_bytes >= 0, "at least 0"),
            ("protected_cache_share", 0 <= self.protected_cache_share <= 1, "a share between 0 and 1"),
        )

    @property
    def cached_lead_tokens(self) -> int:
        """How far above the lowest counter a tenant may stand and go next for what of its prompts is cached."""
        if not self.prefix_caching:
            return 0
        return self.max_num_batched_tokens if self.cached_lead is None else self.cached_lead

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def folder(self) -> Path:
        """Where the checkpoint lies."""
        return Path(self.model)

    @property
    def tokenizer_folder(self) -> Path:
        """Where tokenizer.json lies."""
        return Path(self.tokenizer or self.model)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it is one of {', '.join(allowed)}")


def _is(bound: str, name: str, value: object, is_met: bool) -> None:
    if not is_met:
        raise ValueError(f"{name} is {value}; it is {bound}")
