# The plan of the house, held against the code: imports flow one way, and importing a module does nothing but define.

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
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
    "tools": {"protocol", "router", "gateway", "gpu_backend"},
}
# Folders that import from one below them in the order of docs/architecture.md. May only become fewer.
AGAINST_THE_ORDER: set[tuple[str, str]] = set()
# What needs no web stack.
CORE = (
    *("engine", "execution", "hardware", "kernels", "kv_cache"),
    *("models", "sampling", "scheduling", "speculation", "step"),
)
# The gateway meets the engine over HTTP; only the all-in-one command knows where the demo model lies.
MAY_KNOW_THE_ENGINE = {"gateway/dev/stack.py"}


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
    circle: list[str] = []
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as exc:
        circle = exc.args[1]

    assert circle == []


def test_folders_use_only_those_above_them() -> None:
    """Folders stand in one order, which docs/architecture.md shows: each imports only from those above it there."""
    place = {folder: number for number, folder in enumerate(told_folders())}
    names = {name_of(path): path for package in MAY_USE for path in modules_of(package)}
    wrong = set()
    for path in names.values():
        folder = folder_of(path)
        used = {folder_of(names[name]) for name in needs_of(path, names)} - {folder}
        wrong |= {(folder, other) for other in used & place.keys() if place[other] > place.get(folder, -1)}

    assert wrong == AGAINST_THE_ORDER, "folder that imports, folder below it that it imports from"


def test_architecture_names_every_folder() -> None:
    """Every folder that holds modules has its line in docs/architecture.md, and no other has."""
    holding = {folder_of(path) for package in MAY_USE for path in modules_of(package) if not is_mere_package(path)}

    assert sorted(told_folders()) == sorted(holding)


def test_folders_are_small() -> None:
    """A folder is one idea: at most 15 modules, migrations apart; and at most eight lie flat in gateway/."""
    holding = Counter(folder_of(path) for package in MAY_USE for path in modules_of(package) if path.stem != "__init__")
    del holding["migrations/versions"]

    assert {folder: size for folder, size in holding.items() if size > 15} == {}
    assert holding["gateway"] <= 8


def test_the_route_of_a_chat_needs_few_modules() -> None:
    """It knows the pipeline by what it asks of it, not by its modules."""
    names = {name_of(path): path for package in MAY_USE for path in modules_of(package)}
    found, waiting = set[str](), {"gateway.http.routes.chat"}
    while waiting:
        found |= waiting
        waiting = {needed for name in waiting for needed in needs_of(names[name], names)} - found

    assert len(found) - 1 <= 120


def told_folders() -> list[str]:
    """Return the folders of docs/architecture.md in their order, lowest first."""
    return re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)


def folder_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def is_mere_package(path: Path) -> bool:
    """Whether a file only says that its folder is a package."""
    return path.stem == "__init__" and not ast.parse(path.read_text()).body


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
    """The core of the engine runs on a bare GPU image: torch, triton, safetensors, tokenizers, nothing else."""
    foreign = {"protocol", "msgspec", "litestar", "uvicorn", "httpx", "numpy", "transformers", "jinja2", "structlog"}
    wrong = []
    for folder in CORE:
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


@pytest.mark.parametrize(
    "module", ["gateway.run.app", "gateway.cli", "gateway.config.file", "gateway.dev.stack", "gpu_backend.server.app"]
)
def test_what_serves_never_loads_the_heavy_libraries(module: str) -> None:
    """A gateway's or front end's memory has no room for torch, scikit-learn, scipy or transformers; a gateway's, as its
    command imports it, none for SQLAlchemy's ORM, rich and OpenTelemetry's SDK either. What only reads the
    configuration, as a worker's health check does, loads less still."""
    code = f"import sys, {module}"
    heavy = ["torch", "sklearn", "scipy", "transformers"]
    if module == "gateway.run.app":  # after the configuration, as `tollgate serve` imports it
        lean = "import_leanly, import_redis; import_leanly(); import_redis()"
        code = f"import gateway.config.file; from gateway.run.tuning import {lean}; {code}"
        heavy += ["sqlalchemy.orm", "rich", "opentelemetry.sdk"]
    elif module == "gateway.config.file":
        heavy += ["numpy", "structlog", "asyncio", "sqlalchemy", "redis"]
    code += f"; print([name for name in {heavy} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_benchmarks_import_what_is_there_at_run_time() -> None:
    """No test runs most of them, and a name that stands under TYPE_CHECKING alone is there for the types only."""
    missing = [
        f"{path.name}: {node.module}.{alias.name}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for node in run_time(ast.parse(path.read_text()).body)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if (target := ROOT / (node.module.replace(".", "/") + ".py")).exists()
        and alias.name not in names_in(target)
        and not (target.with_suffix("") / alias.name).with_suffix(".py").exists()
    ]

    assert missing == []


def run_time(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that a module runs when it is imported, but for what is for the types only."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from run_time([*node.body, *node.orelse])
        elif isinstance(node, ast.If):
            yield from run_time(node.orelse)
        elif isinstance(node, ast.Try):
            yield from run_time([*node.body, *(each for handler in node.handlers for each in handler.body)])
        else:
            yield node


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names that a module has once it is imported."""
    found: set[str] = set()
    for node in run_time(ast.parse(path.read_text()).body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name for alias in node.names}
            case ast.Assign() | ast.AnnAssign():
                found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return frozenset(found)


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


MOST_COLLABORATORS = 8
EDGES = ("gateway/http/", "gateway/run/", "gateway/core/parts.py")


@pytest.mark.parametrize("package", ["protocol", "billing", "router", "gateway"])
def test_no_object_takes_a_bag(package: str) -> None:
    """An object or function takes at most eight collaborators, by name; ``Parts`` is asked for at the edges alone."""
    crowded = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in modules_of(package)
        if not path.is_relative_to(ROOT / "gateway/commands")  # typer reads a command's options off its arguments
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len([each for each in node.args.args if each.arg not in ("self", "cls")]) > MOST_COLLABORATORS
    ]
    reaching = [
        str(path.relative_to(ROOT))
        for path in modules_of(package)
        if "gateway.core.parts" in imports_of(path) and not str(path.relative_to(ROOT)).startswith(EDGES)
    ]

    assert crowded == []
    assert reaching == []


def test_migrations_are_numbered_one_after_the_other() -> None:
    """From the first that was released on, each begins where the one before it ends; the program needs the last."""
    from gateway.storage.schema import FIRST, NEEDED

    files = sorted((ROOT / "migrations" / "versions").glob("0*.py"))
    numbers = [f"{int(FIRST) + place:04}" for place in range(len(files))]
    texts = [path.read_text() for path in files]

    assert [path.name[:4] for path in files] == numbers
    assert all(f'\nrevision = "{one}"\n' in text for one, text in zip(numbers, texts, strict=True))
    assert all(f'\ndown_revision = "{one}"\n' in text for one, text in zip(numbers, texts[1:], strict=False))
    assert numbers[-1] == NEEDED
