# What an image is built of, as a bill of materials (CycloneDX 1.6, JSON): python deploy/sbom.py gateway > sbom.json
# Each component of locks/NAME.txt with its version and the digests of its files. `make release` writes both.

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parents[1]
PINNED = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==(\S+)((?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE)


def bill_of(name: str) -> str:
    """Return the bill of the image ``name``: gateway or engine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bom = Bom()
    bom.metadata.component = component(project["name"], project["version"], ComponentType.APPLICATION)
    for package, version, rest in PINNED.findall((ROOT / "locks" / f"{name}.txt").read_text()):
        part = component(package, version, ComponentType.LIBRARY)
        part.hashes.update(
            HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in re.findall(r"sha256:(\w{64})", rest)
        )
        bom.components.add(part)
    bom.register_dependency(bom.metadata.component, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=2)


def component(name: str, version: str, kind: ComponentType) -> Component:
    """Return a package of PyPI."""
    purl = PackageURL("pypi", name=name.lower().replace("_", "-"), version=version)
    return Component(name=name, version=version, type=kind, purl=purl, bom_ref=str(purl))


if __name__ == "__main__":
    sys.stdout.write(bill_of(sys.argv[1]) + "\n")
