# The names of adapters as clients ask for them, and how they come and go while the engine's process runs.

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from gpu_backend.step.adapter import Adapter
from gpu_backend.step.config import LoraConfig
from gpu_backend.step.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from protocol.errors import BadRequest, Overloaded, invalid_param

Send = Callable[[LoadAdapter | UnloadAdapter], None]


class AdapterNames:
    """Owns them; the engine's process hears by ``send``, a new one by ``config``."""

    def __init__(self, config: LoraConfig, send: Send) -> None:
        self.by_name = {adapter.name: adapter for adapter in config.lora_modules}
        self._config = config
        self._send = send
        self._last = max([adapter.number for adapter in config.lora_modules], default=0)
        self._asked: dict[int, tuple[Adapter, asyncio.Future[str | None]]] = {}

    @property
    def config(self) -> LoraConfig:
        """What a process that starts now is to have."""
        return replace(self._config, lora_modules=tuple(self.by_name.values()))

    async def load(self, name: str, folder: str) -> None:
        """Have an adapter loaded. Raises ``BadRequest`` for one that is none or has no room."""
        if name in self.by_name or any(adapter.name == name for adapter, _ in self._asked.values()):
            raise invalid_param("lora_name", f"The lora adapter '{name}' has already been loaded. Unload it first.")
        try:
            adapter = Adapter(self._last + 1, name, folder, came_later=True)
        except ValueError as exc:
            raise invalid_param("lora_name", f"{exc}.") from exc
        self._last += 1
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._asked[adapter.number] = adapter, answer
        self._send(LoadAdapter(adapter))
        if (problem := await answer) is not None:
            raise BadRequest(f"The lora adapter '{name}' cannot be loaded: {problem}.", param="lora_path")

    def unload(self, name: str) -> bool:
        """Let an adapter go: replies that have it go on to their end. False: there is none of that name."""
        adapter = self.by_name.pop(name, None)
        if adapter is not None:
            self._send(UnloadAdapter(adapter.number))
        return adapter is not None

    def answer(self, event: AdapterLoaded) -> None:
        """Take what the process says of one that it was to load, whether its client still waits or not."""
        adapter, answer = self._asked.pop(event.number)
        if event.problem is None:
            self.by_name[adapter.name] = adapter
        if not answer.done():
            answer.set_result(event.problem)

    def fail(self) -> None:
        """The process died: what it was about to load is not there."""
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(Overloaded("The engine's process died while it loaded the adapter. Try again."))
        self._asked.clear()
