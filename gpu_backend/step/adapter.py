# A LoRA adapter as clients, the engine and routers know it.

from __future__ import annotations

from dataclasses import dataclass

NONE = 0  # in place of an adapter's number: the model as it is
LONGEST_NAME = 200  # characters: gateways read no longer one
ANY = -1  # whichever has the first slot, loaded or not: a step of no request, whose result nothing reads


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of the model, by the name that clients ask for. Raises ``ValueError`` for one that is no name.

    Every load has a number of its own, from 1 on, also that of a name which was there before: what the cache holds of
    the former weights is never found by the new ones.
    """

    number: int
    name: str
    folder: str  # of its adapter_config.json and adapter_model.safetensors
    came_later: bool = False  # a client had it loaded, when the engine ran

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= LONGEST_NAME or not self.name.isprintable():
            raise ValueError(
                f"{self.name[:100]!r} is no name of an adapter: 1 to {LONGEST_NAME} characters that can be printed"
            )
