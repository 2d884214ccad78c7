# torch without what only its compilers ask for: a quarter of the CPU time until an engine is ready.

from __future__ import annotations

import sys
from types import ModuleType

# Rules for the shapes of results where nothing is computed, for tracing and compiling: the engine does neither. torch
# registers a thousand of them, and reads a second description of all its operations for them.
UNUSED = ("torch._meta_registrations", "torch.export")


def import_torch() -> None:
    """Import torch without ``UNUSED``. Who imports one of them by name later gets it; after torch this does nothing."""
    if "torch" in sys.modules:
        return
    sys.modules.update({name: ModuleType(name) for name in UNUSED})
    try:
        import torch
    finally:
        for name in UNUSED:
            del sys.modules[name]
    for name in UNUSED:
        delattr(torch, name.removeprefix("torch."))
