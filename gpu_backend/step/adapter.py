# A LoRA adapter as clients, the engine and routers know it.

from __future__ import annotations

from dataclasses import dataclass

NONE = 0  # in place of an adapter's number: the model as it is
ANY = -1  # whichever has the first slot, loaded or not: a step of no request, whose result nothing reads


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of the model, by the name that clients ask for.

    Every load has a number of its own, from 1 on, also that of a name which was there before: what the cache holds of
    the former weights is never found by the new ones.
    """

    number: int
    name: str
    folder: str  # of its adapter_config.json and adapter_model.safetensors
    came_later: bool = False  # a client had it loaded, when the engine ran
