# Options that several commands have: a struct of them is one parameter of a command.

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import Struct
from typer.testing import CliRunner

from gateway.terminal.options import with_options


class Bounds(Struct, frozen=True):
    """Two options."""

    least: Annotated[int, typer.Option(help="At least")] = 1
    most: Annotated[int | None, typer.Option("--at-most")] = None


def test_the_fields_of_a_struct_are_options_of_its_command() -> None:
    """By their names or those that they say, with their defaults, beside the command's own."""
    given: list[object] = []
    app = typer.Typer()

    @app.command()
    @with_options
    def command(name: str, bounds: Bounds, *, loud: bool = False) -> None:
        """Take what is said."""
        given.append((name, bounds, loud))

    for line in (["a"], ["b", "--least", "2", "--at-most", "7", "--loud"]):
        assert CliRunner().invoke(app, line).exit_code == 0

    assert given == [("a", Bounds(), False), ("b", Bounds(2, 7), True)]
    assert CliRunner().invoke(app, ["a", "--most", "7"]).exit_code == 2
