# The plan of the house, held against the code: imports flow one way, and importing a module does nothing but define.

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Container
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_USE = {
    "protocol": set(),
    "billing": {"protocol"},
    "router": {"protocol", "billing"},
    "gpu_backend": {"protocol"},
    "migrations": {"billing", "gateway"},
    "gateway": {"protocol", "billing", "router", "migrations", "gpu_backend"},
}
# The gateway meets the engine over HTTP; only the all-in-one command knows where the demo model lies.
MAY_KNOW_THE_ENGINE = {"gateway/local/house.py"}


@cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module and node.level == 0:
            names.add(node.module)
    return names


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_USE)
def test_imports_flow_one_way(package: str) -> None:
    """A package imports only those of ours that stand below it."""
    wrong = []
    for path in modules_of(package):
        ours = {name.split(".")[0] for name in imports_of(path)} & MAY_USE.keys()
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in ours - MAY_USE[package] - {package}]

    assert wrong == []


def test_no_module_needs_itself() -> None:
    """No circle of imports, for types or within functions either: a file is understood from those below it."""
    names = {name_of(path): path for package in MAY_USE for path in modules_of(package)}
    needed = {name: needs_of(path, names) - {name} for name, path in names.items()}
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as exc:
        pytest.fail(" -> ".join(reversed(exc.args[1])))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def needs_of(path: Path, names: Container[str]) -> set[str]:
    """Return the modules among ``names`` that a file imports: of "from a import b" a.b if there is one, else a."""
    found: set[str] = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in names else str(node.module) for name in inner}
    return {name for name in found if name in names}


def test_only_the_server_of_the_engine_knows_the_web() -> None:
    """engine/, models/ and kernels/ run on a bare GPU image: torch, triton, safetensors, tokenizers, nothing else."""
    foreign = {"protocol", "msgspec", "litestar", "uvicorn", "httpx", "numpy", "transformers", "jinja2", "structlog"}
    wrong = []
    for folder in ("engine", "models", "kernels"):
        for path in modules_of(f"gpu_backend/{folder}"):
            used = {name.split(".")[0] for name in imports_of(path)} & foreign
            wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in used]

    assert wrong == []


def test_the_gateway_meets_the_engine_only_over_http() -> None:
    """No module of the gateway imports the engine, but the one that starts the demo."""
    knowing = {
        str(path.relative_to(ROOT))
        for path in modules_of("gateway")
        if any(name.split(".")[0] == "gpu_backend" for name in imports_of(path))
    }

    assert knowing <= MAY_KNOW_THE_ENGINE


@pytest.mark.parametrize("module", ["gateway.app", "gateway.cli", "gateway.local.house", "gpu_backend.server.app"])
def test_what_serves_never_loads_the_heavy_libraries(module: str) -> None:
    """A gateway's or front end's memory has no room for torch, scikit-learn, scipy or transformers; a gateway's, as its
    command imports it, none for SQLAlchemy's ORM and rich either."""
    code = f"import sys, {module}"
    heavy = ["torch", "sklearn", "scipy", "transformers"]
    if module == "gateway.app":
        code = f"from gateway.lean_imports import import_leanly; import_leanly(); {code}"
        heavy += ["sqlalchemy.orm", "rich"]
    code += f"; print([name for name in {heavy} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_project_speaks_of_itself_alone() -> None:
    """No committed text names a folder of one machine or a sibling of the checkout."""
    files = subprocess.run(["git", "ls-files", "-z"], capture_output=True, cwd=ROOT, check=False).stdout.split(b"\0")
    if files == [b""]:
        pytest.skip("SKIPPED: not a git checkout")
    words = [b"/" + b"work/", b"../" + b"shared", b"/root" + b"/"]
    wrong = []
    for name in filter(None, files):
        path = ROOT / name.decode()
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".sh", ".lua", "") and path.is_file():
            text = path.read_bytes()
            wrong += [f"{name.decode()}: {word.decode()}" for word in words if word in text]

    assert wrong == []
