# torch without what only its compilers ask for: a quarter of the CPU time until an engine on a CPU is ready.

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

# Rules for the shapes of results where nothing is computed, for tracing and compiling: the engine does neither. torch
# registers a thousand of them, and reads a second description of all its operations for them.
UNUSED = ("torch._meta_registrations", "torch.export")
NVIDIA = Path("/dev/nvidiactl")  # its driver is there


def import_torch() -> None:
    """Import torch without ``UNUSED``. A later import of one of them by name works; after torch this does nothing.

    Where there may be a GPU torch is imported whole: that the rest is enough for one has not been shown.
    """
    if "torch" in sys.modules or NVIDIA.exists():
        return
    sys.modules.update({name: ModuleType(name) for name in UNUSED})
    try:
        import torch
    finally:
        for name in UNUSED:
            del sys.modules[name]
    for name in UNUSED:
        delattr(torch, name.removeprefix("torch."))
    if bind := getattr(torch._C, "_set_generator_metaclass", None):  # from torch 2.13 on, and elsewhere done by UNUSED
        from torch._opaque_base import OpaqueBaseMeta

        bind(OpaqueBaseMeta)
