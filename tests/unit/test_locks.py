# What the images are built of stands in locks/, to the digest, and says the same as what developers install.

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIN = re.compile(r"(?m)^([\w.-]+)(?:\[[\w,]+\])?==(\S+)((?:.*\\\n)(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)?")


def pins_of(path: Path) -> dict[str, tuple[str, bool]]:
    """Return the version of each package, and whether its digests are there."""
    return {plain(name): (version, bool(hashes)) for name, version, hashes in PIN.findall(path.read_text())}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~; ]", name)[0]).lower()


@pytest.mark.parametrize(
    ("lock", "extras"), [("gateway.txt", ["otel", "reader"]), ("engine.txt", ["engine", "vision"])]
)
def test_a_lock_has_everything_at_the_versions_that_were_tested(lock: str, extras: list[str]) -> None:
    """After a change of pyproject.toml or constraints.txt, `make lock` writes them anew."""
    pins, tested = pins_of(ROOT / "locks" / lock), pins_of(ROOT / "constraints.txt")
    needed = [*PROJECT["dependencies"], *(each for extra in extras for each in PROJECT["optional-dependencies"][extra])]

    assert {plain(each) for each in needed} | {"setuptools"} <= pins.keys()
    assert all(has_digests for _, has_digests in pins.values())
    assert {name: pins[name][0] for name in pins.keys() & tested.keys()} == {
        name: tested[name][0] for name in pins.keys() & tested.keys()
    }


def test_images_install_nothing_else() -> None:
    """Each pip of the Dockerfile checks digests, or installs our own package and nothing with it."""
    commands = re.findall(r"pip install (.*)", (ROOT / "Dockerfile").read_text())

    assert len(commands) == 3
    for words in commands:
        assert words.startswith(("--require-hashes --only-binary :all: -r locks/", "--no-deps --no-build-isolation ."))
