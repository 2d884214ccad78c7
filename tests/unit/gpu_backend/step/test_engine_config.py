# Settings that cannot work are refused before anything is loaded, and the front end stays light.

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_backend
from gpu_backend.step.config import engine_config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, r"device is 'tpu'; it is one of auto, cuda, cpu"),
        ({"dtype": "int3"}, r"dtype is 'int3'"),
        ({"load_format": "pickle"}, r"load_format is 'pickle'"),
        ({"max_num_seqs": 0}, r"max_num_seqs is 0; it is at least 1"),
        ({"block_size": -4}, r"block_size is -4"),
        ({"kv_transfer_address": "gpu-0"}, r"is gpu-0; it is HOST:PORT"),
        ({"kv_transfer_address": "0.0.0.0:1"}, r"is 0\.0\.0\.0:1; it is an address by which others reach"),
        ({"kv_transfer_address": "[::]:0"}, r"it is an address by which others reach"),
        ({"num_kv_blocks": 0}, r"num_kv_blocks is 0"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens is 0; it is 1 to 16"),
        ({"speculative_method": "draft"}, r"the methods draft and eagle3, and no others, need a model"),
        (
            {"speculative_method": "ngram", "speculative_model": "x"},
            r"the methods draft and eagle3, and no others, need a model",
        ),
        ({"gpu_memory_share": 1.5}, r"a share between 0 and 1"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, r"raise the first or lower the second"),
    ],
)
def test_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    """The error names the setting, its value and what it may be."""
    with pytest.raises(ValueError, match=message):
        engine_config(model="x", **settings)


CORE = (
    *("engine", "execution", "hardware", "kernels", "kv_cache", "kv_transfer", "lora"),
    *("models", "sampling", "scheduling", "speculation", "step"),
)


def test_front_end_does_not_import_torch() -> None:
    """What the HTTP process needs of the engine loads neither torch nor the web stack."""
    program = (
        "import sys, gpu_backend.step.config, gpu_backend.engine.process, gpu_backend.step.messages;"
        "print([name for name in ('torch', 'safetensors', 'litestar', 'msgspec', 'numpy') if name in sys.modules])"
    )

    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert out.strip() == "[]"


def test_core_imports_only_what_a_gpu_machine_has() -> None:
    """The core of the engine needs torch, triton, safetensors and tokenizers, and nothing else but Python."""
    root = Path(gpu_backend.__file__).parent
    allowed = {"torch", "triton", "safetensors", "tokenizers", *sys.stdlib_module_names}
    ours = tuple(f"gpu_backend.{folder}" for folder in CORE)

    llguidance = {("grammar.py", name) for name in ("llguidance", "llguidance.gbnf_to_lark")}
    optional = llguidance | {("nixl.py", "nixl._api")}  # in functions, where it is there
    strangers = [
        f"{path.relative_to(root)} imports {name}"
        for folder in CORE
        for path in sorted((root / folder).rglob("*.py"))
        for name in imported_modules(path)
        if name.split(".")[0] not in allowed and not name.startswith(ours) and (path.name, name) not in optional
    ]

    assert strangers == []


def test_core_imports_without_what_is_optional() -> None:
    """On a GPU image without the grammar library everything else of the core is there, and asks for nothing that an
    engine's process leaves out of torch; who does ask later gets it."""
    code = (
        "import importlib, pathlib, sys\n"
        "from gpu_backend.engine.torch_import import NVIDIA, UNUSED, import_torch\n"
        "sys.modules['llguidance'] = None\n"
        "import_torch()\n"
        "import torch\n"
        "assert torch.Generator('cpu').manual_seed(3).initial_seed() == 3\n"
        "root = pathlib.Path(importlib.import_module('gpu_backend').__file__).parent\n"
        f"for folder in {CORE}:\n"
        "    for path in sorted((root / folder).rglob('*.py')):\n"
        "        importlib.import_module('gpu_backend.' + '.'.join(path.relative_to(root).with_suffix('').parts))\n"
        "assert NVIDIA.exists() or not sys.modules.keys() & set(UNUSED)\n"
        "import torch.export, torch._meta_registrations, torch._prims.rng_prims\n"
        "assert torch.Generator('cpu').manual_seed(3).initial_seed() == 3\n"
        "assert torch.export.export.__module__ == 'torch.export'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def imported_modules(path: Path) -> list[str]:
    """Return the full names of the modules that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names
