# Answers that `tollgate doctor --live` recorded: a file that is put into tests/wire/recordings is read from then on.
# Its name begins with the format's.

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recordings import ENDS, read_recorded, recorded_in, told_wrongly

FILES = sorted((Path(__file__).parent / "recordings").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_recording_of_ones_own_is_read(file: Path) -> None:
    """Every answer to its last word and count, every refusal as whose fault it is."""
    name = next(name for name in ENDS if file.name.startswith(name))
    for one in recorded_in(file, name):
        if one.status >= 400:
            assert told_wrongly(name, one) is None
        else:
            reply, usage = read_recorded(name, one)
            assert reply.choices and usage is not None and usage.input_tokens > 0
