# What is released: a wheel and a source archive that hold all that is needed, install into a clean environment, and
# bills of materials that name what the images are built of.

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gateway.core.version import VERSION

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "router", "billing", "gateway", "gpu_backend", "migrations")
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # which setuptools takes for its own
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


def tracked(*folders: str) -> set[str]:
    """Return the files of the checkout, as git knows them."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, check=False).stdout
    return {name.decode() for name in listed.split(b"\0") if name and (ROOT / name.decode()).is_file()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel, built by what is installed, without a network."""
    files = tracked()
    if not files:
        pytest.skip("SKIPPED: not a git checkout")
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The `tollgate` of a clean environment that has the wheel, and what it depends on from ours."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    # A folder that a .pth file names is searched, and no .pth file in it is read: our own checkout is not there.
    (site / "dependencies.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"
    )
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-index", "--no-compile", "--quiet", "--ignore-installed", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    yield home / "bin" / "tollgate"


def run(command: Path, *words: str, folder: Path) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    done = subprocess.run(
        [command, *words], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_versions_agree() -> None:
    """Of the package, of the program, of the images and of the newest release of the changelog."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    images = {service["image"].partition(":")[2] for service in services if service["image"].startswith("tollgate")}
    released = re.findall(
        r"^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )

    assert {project["version"], *images, released[0]} == {VERSION}


def test_the_wheel_and_the_source_archive_are_whole(dist: Path) -> None:
    """Every file of the packages, data too; the archive also what builds and explains it."""
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as packed, tarfile.open(archive) as source:
        in_wheel = set(packed.namelist())
        in_archive = {name.partition("/")[2] for name in source.getnames()}

    files = tracked(*PACKAGES)
    assert sorted(files - in_wheel) == []
    assert sorted(files - in_archive) == []
    assert {"pyproject.toml", "README.md", "LICENSE"} <= in_archive
    assert {name.split("/")[0] for name in in_wheel} == {*PACKAGES, f"tollgate-{VERSION}.dist-info"}


@pytest.mark.soak
def test_the_wheel_alone_runs(installed: Path, tmp_path: Path) -> None:
    """`tollgate` in a clean environment: its version, a configuration made and checked, no file of the checkout."""
    assert run(installed, "--version", folder=tmp_path) == f"tollgate {VERSION}\n"
    assert "tollgate.yaml offers" in run(installed, "init", "--provider", "openai", folder=tmp_path)
    python = installed.with_name("python")
    where = (
        "import gateway, gpu_backend, migrations; print(gateway.__file__, gpu_backend.__file__, migrations.__file__)"
    )
    assert str(ROOT) not in run(python, "-c", where, folder=tmp_path)


@pytest.mark.soak
def test_the_whole_stack_runs_from_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    """`tollgate dev`, and a question by `tollgate chat` in the same folder."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    words = [installed, "dev", "--json", "--port", "8471"]
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as stack:
        try:
            assert stack.stdout is not None
            ready = json.loads(stack.stdout.readline())
            said = run(installed, "chat", "auto", "What is Tollgate?", "--max-tokens", "8", folder=tmp_path)
            well = run(installed, "doctor", folder=tmp_path)
        finally:
            stack.send_signal(signal.SIGTERM)
            stack.wait(60)

    assert ready["url"].endswith(":8471") and said.strip()
    assert well.splitlines()[-1].endswith(" 0 faults")


@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_a_bill_of_materials_names_all_that_an_image_is_built_of(name: str) -> None:
    """Each pinned package with its version and the digests of its files."""
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "sbom.py", name], capture_output=True, text=True, check=True
    )
    bill = json.loads(done.stdout)
    pinned = re.findall(r"^([\w.-]+)(?:\[.*\])?==([^\s;]+)", (ROOT / "locks" / f"{name}.txt").read_text(), re.MULTILINE)

    assert {(part["name"], part["version"]) for part in bill["components"]} == set(pinned)
    assert all(part["hashes"] and part["purl"].startswith("pkg:pypi/") for part in bill["components"])
    assert (bill["metadata"]["component"]["version"], bill["specVersion"]) == (VERSION, "1.6")
