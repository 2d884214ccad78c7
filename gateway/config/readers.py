# What a setting may look like: small readers from a node of the file to a value. A reader that cannot read its node
# notes a fault that says what would be right and returns None, so that one look at the file finds everything.

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from ipaddress import IPv4Network, IPv6Network, ip_interface
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from msgspec.structs import fields

from billing.core.money import NanoDollars, to_nano
from gateway.config.fields import NUMBER, WORDS_OF_YAML, Faults, Fields, Read, complain, is_empty, kind_of
from gateway.config.tree import Items, Node, Scalar, Section
from gateway.config.weakness import meant_variable, why_no_service, why_weak
from gateway.core.clock import read_duration
from gateway.core.settings import Count, Number, Part, Seconds, SecondsOrNone, Share
from protocol.serving.redis_url import EXAMPLE, ONE, read_servers

T = TypeVar("T")

SMALLEST_DOLLARS = Decimal("1e-9")

_INTEGER = re.compile(r"[+-]?\d[\d_]*")


def text(node: Node, faults: Faults) -> str | None:
    """Read a text that is not empty."""
    if not isinstance(node, Scalar):
        return complain(node, faults, f"expected a text, found {kind_of(node)}")
    if node.is_broken:
        return None
    if not node.text.strip():
        return complain(node, faults, "expected a text, found an empty one")
    if not node.is_quoted and not node.is_expanded and node.text.lower() in WORDS_OF_YAML:
        return complain(node, faults, f"expected a text, found {kind_of(node)}; put it in quotes if it is meant as one")
    return node.text


def secret(node: Node, faults: Faults) -> str | None:
    """Read a text that no message may show."""
    if isinstance(node, Scalar) and (node.is_broken or node.text.strip()):
        return None if node.is_broken or _names_a_variable(node, faults) else node.text.strip()
    found = "an empty text" if isinstance(node, Scalar) else kind_of(node)
    return complain(node, faults, f"expected a secret as text, such as ${{NAME}}, found {found}")


def strong_secret(node: Node, faults: Faults) -> str | None:
    """Read a secret that gives access to the deployment: one that cannot be guessed."""
    value = secret(node, faults)
    if value is not None and (why := why_weak(value)) is not None:
        return complain(node, faults, why)
    return value


def _names_a_variable(node: Scalar, faults: Faults) -> bool:
    """Note a fault where the file names a variable in a form that is not read here, and so would take it literally."""
    name = meant_variable(node.shown)
    if name is not None:
        complain(node, faults, f"${name} is taken literally; the value of a variable is written ${{{name}}}")
    return name is not None


def secrets(least: int, read_one: Read[str] = secret) -> Read[tuple[str, ...]]:
    """Make a reader of a list of secrets; ``${NAME:-}`` that turns out empty is one less."""

    def read(node: Node, faults: Faults) -> tuple[str, ...] | None:
        if not isinstance(node, Items):
            return complain(node, faults, f"expected a list of secrets: [${{NAME}}]; found {kind_of(node)}")
        if any(isinstance(each, Scalar) and each.is_broken for each in node.items):
            return None
        given = [each for each in node.items if not _is_nothing(each)]
        values = [value for each in given if (value := read_one(each, faults)) is not None]
        if len(given) < least:
            return complain(node, faults, f"expected at least {least}, found {len(given)}")
        if len(set(values)) < len(values):
            return complain(node, faults, "the same secret twice")
        if not all(value.isascii() and value.isprintable() for value in values):
            return complain(node, faults, "a secret that travels in a header is one line of printable ASCII")
        return tuple(values)

    return read


def _is_nothing(node: Node) -> bool:
    return is_empty(node) or (isinstance(node, Scalar) and node.is_expanded and not node.text)


def switch(node: Node, faults: Faults) -> bool | None:
    """Read ``true`` or ``false``."""
    if isinstance(node, Scalar) and not node.is_quoted and node.text.lower() in ("true", "false"):
        return node.text.lower() == "true"
    return complain(node, faults, f"expected true or false, found {kind_of(node)}")


def one_of(*words: str) -> Read[Any]:
    """Make a reader of one of ``words``."""

    def read(node: Node, faults: Faults) -> str | None:
        if isinstance(node, Scalar) and node.text in words:
            return node.text
        return complain(node, faults, f"expected one of {', '.join(words)}; found {kind_of(node)}")

    return read


def integer(least: int, most: int | None = None) -> Read[int]:
    """Make a reader of a whole number from ``least`` to ``most``."""
    span = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"

    def read(node: Node, faults: Faults) -> int | None:
        if isinstance(node, Scalar) and not node.is_quoted and _INTEGER.fullmatch(node.text) and len(node.text) < 20:
            value = int(node.text)
            if value >= least and (most is None or value <= most):
                return value
        return complain(node, faults, f"expected {span}, found {kind_of(node)}")

    return read


def number(least: float, most: float | None = None, *, above: bool = False) -> Read[float]:
    """Make a reader of a number from ``least`` to ``most``; with ``above``, ``least`` itself is too little."""
    span = f"{'above' if above else 'of at least'} {least:g}" + (f" and at most {most:g}" if most is not None else "")

    def read(node: Node, faults: Faults) -> float | None:
        value = _decimal(node)
        if value is not None and (value > least or (value == least and not above)) and (most is None or value <= most):
            return float(value)
        return complain(node, faults, f"expected a number {span}, found {kind_of(node)}")

    return read


def dollars(node: Node, faults: Faults) -> NanoDollars | None:
    """Read an amount in US dollars, zero or more, in billionths; what is less than one is no amount."""
    value = _decimal(node)
    if value is not None and 0 < value < SMALLEST_DOLLARS:
        return complain(node, faults, f"less than a billionth of a dollar, which is nothing: {kind_of(node)}")
    if value is not None and 0 <= value < 1_000_000_000:
        return to_nano(value)
    return complain(node, faults, f"expected US dollars, such as 2.50, found {kind_of(node)}")


def _decimal(node: Node) -> Decimal | None:
    if isinstance(node, Scalar) and not node.is_quoted and NUMBER.fullmatch(node.text) and len(node.text) < 40:
        value = Decimal(node.text.replace("_", ""))
        return value if -400 < value.adjusted() < 300 else None
    return None


def duration(node: Node, faults: Faults) -> float | None:
    """Read a time span above zero, as seconds: ``500ms``, ``2s``, ``1m30s``, ``24h``, ``400d``."""
    value = duration_or_zero(node, faults)
    if value == 0:
        return complain(node, faults, "expected a duration above zero, such as 500ms or 2s")
    return value


def duration_or_zero(node: Node, faults: Faults) -> float | None:
    """Read a time span, as seconds, that may be none at all: ``0s``."""
    if isinstance(node, Scalar) and (seconds := read_duration(node.text)) is not None:
        return seconds
    right = "such as 500ms, 2s, 10m, 24h or 400d"
    if isinstance(node, Scalar) and not node.is_expanded and NUMBER.fullmatch(node.text):
        right = f"a number needs its unit: {node.text}s?"
    return complain(node, faults, f"expected a duration, {right}; found {kind_of(node)}")


def network(node: Node, faults: Faults) -> IPv4Network | IPv6Network | None:
    """Read a range of addresses in CIDR notation: ``10.20.0.0/16``."""
    wrong = f"expected a range such as 10.20.0.0/16, found {kind_of(node)}"
    if isinstance(node, Scalar):
        with suppress(ValueError):
            given = ip_interface(node.text)
            if given.ip == given.network.network_address:
                return given.network
            if not node.is_expanded:  # else the range would show what the variable holds
                wrong = f"an address with bits beyond the prefix; the range is {given.network}"
    return complain(node, faults, wrong)


def url(schemes: tuple[str, ...], example: str) -> Read[str]:
    """Make a reader of a URL that may hold a password and is therefore never shown."""

    def read(node: Node, faults: Faults) -> str | None:
        value = text(node, faults)
        if value is None or (isinstance(node, Scalar) and _names_a_variable(node, faults)):
            return None
        try:
            parts = urlsplit(value)
            fits = parts.scheme in schemes and bool(parts.netloc or parts.path.strip("/"))
            parts.port  # noqa: B018  (reading it checks it)
        except ValueError:
            fits = False
        if not fits:
            right = f"expected a URL such as {example}, special characters in a password written as %XX"
            return complain(node, faults, right)
        if (why := why_no_service(parts.hostname or "")) is not None:
            return complain(node, faults, why)
        return value

    return read


def redis_url(node: Node, faults: Faults) -> str | None:
    """Read where Redis is: one server or several (``protocol/serving/redis_url.py``). It is never shown."""
    value = text(node, faults)
    if value is None or (isinstance(node, Scalar) and _names_a_variable(node, faults)):
        return None
    try:
        several = read_servers(value)
    except ValueError as exc:
        return complain(node, faults, str(exc))
    if several is None:
        return url(ONE, EXAMPLE)(node, faults)
    for host, _ in several.addresses:
        if (why := why_no_service(host)) is not None:
            return complain(node, faults, why)
    return value


def origin(node: Node, faults: Faults) -> str | None:
    """Read the origin of a web page as browsers write it, or ``*`` for any: ``https://app.example.com``."""
    if isinstance(node, Scalar):
        value = node.text
        try:
            parts = urlsplit(value)
            written = f"{parts.scheme}://{parts.netloc}".lower()
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in value and "*" not in value
            parts.port  # noqa: B018  (reading it checks it)
        except ValueError:
            fits, written = False, ""
        if value == "*" or (fits and value == written):
            return value
    return complain(node, faults, f"expected an origin such as https://app.example.com, found {kind_of(node)}")


def list_of(read: Read[T], *, what: str, least: int = 0) -> Read[tuple[T, ...]]:
    """Make a reader of a list of at least ``least`` things."""

    def read_all(node: Node, faults: Faults) -> tuple[T, ...] | None:
        if not isinstance(node, Items):
            return complain(node, faults, f"expected a list of {what}: [a, b]; found {kind_of(node)}")
        if len(node.items) < least:
            return complain(node, faults, f"expected a list of at least {least} {what}, found {len(node.items)}")
        values = [read(each, faults) for each in node.items]
        return tuple(value for value in values if value is not None)

    return read_all


def by_name(read: Read[T], right: str) -> Read[dict[str, T]]:
    """Make a reader of one thing for each name that the file chooses, in its order. ``right``: as it is written."""

    def read_all(node: Node, faults: Faults) -> dict[str, T] | None:
        if not isinstance(node, Section):
            return complain(node, faults, f"expected {right}; found {kind_of(node)}")
        found = {name: read(each, faults) for name, each in node.entries.items()}
        return {name: each for name, each in found.items() if each is not None}

    return read_all


def struct_of(kind: type[T], **said: Read[Any]) -> Read[T]:
    """Make a reader of a struct: each field is read as its type says, but for those ``said``. One without a default is
    needed."""

    def read(node: Node, faults: Faults) -> T | None:
        types = get_type_hints(kind, include_extras=True)  # now: a file has few of all sections
        each = fields(kind)  # type: ignore[arg-type]
        readers = {one.name: said.get(one.name) or _reader_of(types[one.name]) for one in each}
        return section_of(kind, readers, tuple(one.name for one in each if one.required))(node, faults)

    return read


def _reader_of(kind: Any) -> Read[Any]:
    if (found := _OF_TYPES.get(kind)) is not None:
        return found
    several = get_args(kind)
    if get_origin(kind) is Literal:
        return one_of(*several)
    return _reader_of(several[0]) if several else struct_of(kind)  # a type or None


_OF_TYPES: dict[Any, Read[Any]] = {
    str: text,
    bool: switch,
    Seconds: duration,
    SecondsOrNone: duration_or_zero,
    Part: number(0, 1),
    Share: number(0, 1, above=True),
    Count: integer(0),
    Number: integer(1),
}


def section_of(kind: Callable[..., T], readers: Mapping[str, Read[Any]], needed: tuple[str, ...] = ()) -> Read[T]:
    """Make a reader of a section of known keys; those that are absent keep the defaults of ``kind``."""

    def read(node: Node, faults: Faults) -> T | None:
        before = len(faults)
        section = Fields(node, node.path, faults)
        found = {
            key: section.need(key, one, None, "every entry needs it") if key in needed else section.find(key, one)
            for key, one in readers.items()
        }
        section.close()
        values = {key: value for key, value in found.items() if value is not None}
        return kind(**values) if len(faults) == before and values.keys() >= {*needed} else None

    return read
