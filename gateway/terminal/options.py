# Options that several commands have, said once: a command takes a struct of them as one parameter.

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

from msgspec import Struct
from msgspec.structs import fields

from gateway.terminal.address import ApiKeyOption, KeyOption, UrlOption, is_elsewhere
from gateway.terminal.config_path import ConfigOption
from gateway.terminal.printing import Format, FormatOption
from protocol.errors import Unshown


class Place(Unshown, Struct, frozen=True, kw_only=True):
    """The deployment on this machine, or the gateway elsewhere, that a command asks."""

    config: ConfigOption = None
    url: UrlOption = None
    key: KeyOption = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether a gateway is asked over HTTP."""
        return is_elsewhere(self.config, self.url)


class Where(Place, frozen=True, kw_only=True):
    """The same of a command that prints what it finds."""

    format: FormatOption = Format.TABLE


class WhereByApiKey(Where, frozen=True, kw_only=True):
    """The same of a command whose ``--key`` is, or could be taken for, another thing."""

    key: ApiKeyOption = None


def with_options(act: Callable[..., None]) -> Callable[..., None]:
    """Make a command for typer: of each parameter that is a struct, its fields are options of the command."""
    kinds = get_type_hints(act, include_extras=True)
    structs: dict[str, type[Struct]] = {}
    options: list[Parameter] = []
    for parameter in signature(act).parameters.values():
        kind = kinds[parameter.name]
        if isinstance(kind, type) and issubclass(kind, Struct):
            structs[parameter.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            options += (
                Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
                for one in fields(kind)
            )
        else:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))

    @wraps(act)
    def command(**said: Any) -> None:
        for name, kind in structs.items():
            said[name] = kind(**{each: said.pop(each) for each in kind.__struct_fields__})
        act(**said)

    vars(command)["__signature__"] = Signature(options)
    command.__annotations__ = {one.name: one.annotation for one in options}
    return command
