# docs/commands.md names every command.

from __future__ import annotations

import re
from pathlib import Path

from gateway.cli import COMMANDS, app

PAGE = (Path(__file__).parents[4] / "docs" / "commands.md").read_text()


def test_every_command_stands_on_the_page() -> None:
    """In the table of what asks over HTTP, or not."""
    own = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    told = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([\w-]+)`", row)}

    assert {name for name in own | COMMANDS.keys() if name} <= told
