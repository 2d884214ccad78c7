# Variables of tollgate.yaml, ${NAME} and its kin: hidden from the YAML parser, and filled in afterwards, so that a
# secret with a colon or a bracket in it is only ever a value. In messages they keep their name, so that no secret is
# printed.

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = re.compile(r"\$?\$\{[^}\n]*\}")
_NAME = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<fallback>:-(?P<default>.*))?")


class Variables:
    """The variables of one file."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._written: list[str] = []  # as the file has them, by the number of their placeholder
        self._mark = f"\ue000{secrets.token_hex(4)}"  # plain text to YAML, and none that stands in the file
        self._placeholder = re.compile(f"{self._mark}:([0-9]+)\ue001")

    def hide(self, text: str) -> str:
        """Return the file's text with a placeholder for each variable."""
        return _VARIABLE.sub(self._keep, text)

    def are_in(self, text: str) -> bool:
        """Whether a variable is hidden in ``text``."""
        return self._placeholder.search(text) is not None

    def fill(self, text: str) -> tuple[str, list[str]]:
        """Return ``text`` with every variable filled in, and what is wrong with those that cannot be."""
        wrong: list[str] = []

        def fill_one(match: re.Match[str]) -> str:
            try:
                return self._value_of(self._written[int(match.group(1))])
            except ValueError as exc:
                wrong.append(str(exc))
                return ""

        return self._placeholder.sub(fill_one, text), wrong

    def show(self, text: str) -> str:
        """Return ``text`` with the name of every variable, without its default."""
        return self._placeholder.sub(lambda match: _shown(self._written[int(match.group(1))]), text)

    def _keep(self, match: re.Match[str]) -> str:
        self._written.append(match.group())
        return f"{self._mark}:{len(self._written) - 1}\ue001"

    def _value_of(self, written: str) -> str:
        """Return what ``${…}`` stands for. Raises ValueError with what would be right."""
        if written.startswith("$$"):
            return written[1:]  # $${…} is a literal ${…}
        inner = written[2:-1]
        if inner.startswith("file:"):
            return _content_of(inner.removeprefix("file:"))
        parts = _NAME.fullmatch(inner)
        if parts is None or "${" in inner:
            raise ValueError("a variable is written ${NAME}, ${NAME:-default} or ${file:/run/secrets/name}")
        value = self._env.get(parts["name"], "")
        if value or parts["fallback"]:
            return value or parts["default"]
        state = "empty" if parts["name"] in self._env else "not set"
        right = f"set it, or give a default: ${{{parts['name']}:-…}}"
        raise ValueError(f"the environment variable {parts['name']} is {state}; {right}")


def _content_of(name: str) -> str:
    try:
        return Path(name).read_text("utf-8").rstrip("\r\n")
    except OSError as exc:
        raise ValueError(f"the file {name} cannot be read: {exc.strerror}; it must exist and be readable") from exc
    except ValueError as exc:
        raise ValueError(f"the file {name} is not UTF-8 text") from exc


def _shown(written: str) -> str:
    return written.partition(":-")[0].rstrip("}") + "}" if ":-" in written else written
