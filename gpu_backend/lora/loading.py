# Adapters that come and go while the engine runs: read in a thread of their own while steps are computed, put into
# their slots between two steps, and let go when the last reply with them has ended.

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from gpu_backend.lora.peft import LowRank, Place, read_adapter
from gpu_backend.lora.slots import AdapterSlots
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.config import LoraConfig
from gpu_backend.step.messages import AdapterLoaded

Read = Callable[[Adapter], dict[Place, LowRank]]


class AdapterLoader:
    """Owns which adapters there are; ``slots`` are the device's."""

    def __init__(self, slots: AdapterSlots, model: ModelConfig) -> None:
        self._slots = slots
        self._read: Read = lambda adapter: read_adapter(Path(adapter.folder), model, slots.max_rank)
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._reading: dict[int, Future[dict[Place, LowRank]]] = {}
        self._leaving: set[int] = set()

    def __len__(self) -> int:
        """How many are on their way in or out."""
        return len(self._reading) + len(self._leaving)

    def __contains__(self, adapter: Adapter) -> bool:
        """Whether requests may ask for it."""
        number = adapter.number
        return number in self._slots.slot_of and number not in self._reading and number not in self._leaving

    def load(self, adapter: Adapter) -> None:
        """Load one now. Raises ``UnsupportedModel``."""
        parts = self._read(adapter)
        if not self._slots.take(adapter.number):
            raise UnsupportedModel(self._no_room())
        self._slots.fill(adapter.number, parts)

    def begin(self, adapter: Adapter) -> list[AdapterLoaded]:
        """Begin to load one; say so at once where there is no room."""
        if not self._slots.take(adapter.number):
            return [AdapterLoaded(adapter.number, self._no_room())]
        self._reading[adapter.number] = self._reader.submit(self._read, adapter)
        return []

    def unload(self, number: int) -> None:
        """Let one go as soon as no reply has it."""
        if number in self._slots.slot_of:
            self._leaving.add(number)

    def let_go(self, used: Callable[[], Collection[int]]) -> None:
        """Let those that leave go which none of the ``used`` is any more."""
        if self._leaving:
            for number in self._leaving.difference(used()):
                self._leaving.discard(number)
                self._slots.free(number)

    def advance(self, patience: float) -> list[AdapterLoaded]:
        """Put those that are read into their slots; wait at most ``patience`` seconds for the first."""
        if self._reading and patience:
            wait(self._reading.values(), patience, FIRST_COMPLETED)
        done = [number for number, reading in self._reading.items() if reading.done()]
        return [self._finish(number, self._reading.pop(number)) for number in done]

    def _finish(self, number: int, reading: Future[dict[Place, LowRank]]) -> AdapterLoaded:
        try:
            self._slots.fill(number, reading.result())
        except Exception as error:  # the adapter's: the engine goes on without it
            self._slots.free(number)
            problem = str(error) if isinstance(error, UnsupportedModel) else f"{type(error).__name__}: {error}"
            return AdapterLoaded(number, problem)
        return AdapterLoaded(number)

    def _no_room(self) -> str:
        most = self._slots.count
        return (
            f"the device has room for {most} adapters, which are there; unload one, or start it with more --max-loras"
        )


def load_adapters(config: LoraConfig, slots: AdapterSlots, model: ModelConfig) -> AdapterLoader:
    """Load what an engine begins with. Raises ``UnsupportedModel``, but for one that a client had loaded: requests for
    it are refused.
    """
    loader = AdapterLoader(slots, model)
    for adapter in config.lora_modules:
        try:
            loader.load(adapter)
        except Exception as error:
            if not adapter.came_later:
                raise
            print(f"gpu_backend: {adapter.name} is not there any more: {error}", file=sys.stderr, flush=True)  # noqa: T201
    return loader
