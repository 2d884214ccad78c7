# Fields inside of a body's items that its type does not know: a typed decoder passes them over, and their callers are
# told so. What a type keeps as any JSON is known to the last field.

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from msgspec import inspect

MOST_TOLD = 64  # names, of one body

Look = Callable[[Any, str, dict[str, None]], None]  # a decoded value, the names that lead to it, and what was found


def unread_fields(plain: Any, type: Any) -> tuple[str, ...]:
    """Return the names of fields in ``plain``, JSON that decodes as ``type``, that the type does not know: below the
    top, each once, and none that is null or empty."""
    if not isinstance(plain, dict):
        return ()
    found: dict[str, None] = {}
    for name, look in _fields_of(type).looks.items():
        if (value := plain.get(name)) and not isinstance(value, str):
            look(value, name, found)
    return tuple(found)


class _Fields(NamedTuple):
    """The fields of a struct, its tag among them, and how to look into those that hold what could be unknown."""

    known: frozenset[str]
    looks: dict[str, Look]


@cache
def _fields_of(type: Any) -> _Fields:
    info = inspect.type_info(type)
    if not isinstance(info, inspect.StructType):
        return _Fields(frozenset(), {})
    looks = ((field.encode_name, _look_into(field.type)) for field in info.fields)
    tag = () if info.tag_field is None else (info.tag_field,)
    known = frozenset((*tag, *(field.encode_name for field in info.fields)))
    return _Fields(known, {name: look for name, look in looks if look is not None})


def _look_into(info: inspect.Type) -> Look | None:
    match info:
        case inspect.StructType():
            return _look_at_one({info.tag: info.cls}, info.tag_field)
        case inspect.UnionType(types=types):
            return _look_at_any(types)
        case inspect.VarTupleType(item_type=inner) | inspect.ListType(item_type=inner):
            return _look_at_each(inner)
    return None


def _look_at_any(types: Iterable[inspect.Type]) -> Look | None:
    structs = [each for each in types if isinstance(each, inspect.StructType)]
    one = _look_at_one({each.tag: each.cls for each in structs}, structs[0].tag_field) if structs else None
    others = (_look_into(each) for each in types if not isinstance(each, inspect.StructType))
    several = next(filter(None, others), None)
    if one is None or several is None:
        return one or several

    def look(value: Any, path: str, found: dict[str, None]) -> None:
        (one if isinstance(value, dict) else several)(value, path, found)

    return look


def _look_at_one(by_tag: dict[Any, Any], tag_field: str | None) -> Look:
    """Return what looks into one of several structs; into which, and what they hold, is found out as they come: a
    struct may hold others of its own kind."""
    alone = next(iter(by_tag.values())) if len(by_tag) == 1 else None

    def look(value: Any, path: str, found: dict[str, None]) -> None:
        kind = by_tag.get(value.get(tag_field)) if alone is None and isinstance(value, dict) else alone
        if kind is None or not isinstance(value, dict):
            return
        fields = _fields_of(kind)
        if not value.keys() <= fields.known:
            for name, inner in value.items():
                if name not in fields.known and inner not in (None, "", [], {}) and len(found) < MOST_TOLD:
                    found[f"{path}.{name}"] = None
        for name, inner in value.items():
            if inner and not isinstance(inner, str) and (further := fields.looks.get(name)) is not None:
                further(inner, f"{path}.{name}", found)

    return look


def _look_at_each(info: inspect.Type) -> Look | None:
    if (look := _look_into(info)) is None:
        return None

    def look_at_each(value: Any, path: str, found: dict[str, None]) -> None:
        for each in value if isinstance(value, list) else ():
            look(each, path, found)

    return look_at_each
