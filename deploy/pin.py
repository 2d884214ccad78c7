# Writes the digest of each image behind its version, in compose.yaml and in the Dockerfile, as its registry says it:
# from then on the same bytes are run, whatever the version's name comes to stand for. `make pin` runs it; a second time
# it follows versions that were changed by hand. An image that no registry answers for stays as it is, and is named.

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

IMAGES = {
    "compose.yaml": re.compile(
        r"(?m)^ +image: (?P<image>(?!tollgate)[\w./-]+:[\w.-]+)(?P<digest>@sha256:[0-9a-f]{64})?"
    ),
    "Dockerfile": re.compile(r"(?m)^ARG PYTHON=(?P<image>[\w./-]+:[\w.-]+)(?P<digest>@sha256:[0-9a-f]{64})?"),
}
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
WITHIN = 60  # seconds for one answer


def main(folder: Path) -> None:
    """Pin what can be pinned in ``folder``, and say what was done."""
    for name, pattern in IMAGES.items():
        file = folder / name
        written = file.read_text()
        if (pinned := pattern.sub(_pinned, written)) != written:
            file.write_text(pinned)


def _pinned(match: re.Match[str]) -> str:
    image = match["image"]
    digest = _digest_of(image)
    if digest is None:
        return match[0]
    sys.stdout.write(f"{image}@{digest}\n")
    return match[0].removesuffix(match["digest"] or "") + f"@{digest}"


def _digest_of(image: str) -> str | None:
    command = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{.Manifest.Digest}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN)
    except (OSError, subprocess.TimeoutExpired) as exc:
        why = str(exc)
    else:
        if done.returncode == 0 and DIGEST.fullmatch(done.stdout.strip()):
            return done.stdout.strip()
        why = (done.stderr or done.stdout).strip().partition("\n")[0]
    sys.stdout.write(f"SKIPPED: {image} stays as it is: {why}\n")
    return None


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1])
