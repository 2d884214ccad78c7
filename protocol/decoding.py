# Strict decoding of JSON bodies: what two readers could understand differently is refused, with words that help.
# A duplicate key is the classic case: a gateway that counts the first value and an upstream that obeys the last.

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from protocol.errors import BadRequest, TooLarge, missing_param
from protocol.unread import unread_fields

MAX_DEPTH = 128  # objects and arrays inside one another
MAX_VALUES = 400_000  # values in one body: more than any model reads, and 0.3 s of decoding at the most
AT_ONCE = 20_000  # values that are counted without a pause

# What decoding raises for bytes that are no JSON, or none of the promised shape: also for text that is no UTF-8, and
# for nesting that is too deep.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


def decode(body: bytes, type: type[T]) -> T:
    """Decode a JSON ``body`` as ``type``; fields that the type does not know are ignored.

    Raises ``BadRequest``, with ``param`` naming the field at fault, for malformed JSON, a wrong or missing field, a key
    that appears twice in one object, NaN and infinities, numbers too large to keep, invalid UTF-8, half of a surrogate
    pair, and more than ``MAX_DEPTH`` levels of nesting; wherever in the body these are. Raises ``TooLarge`` for more
    than ``MAX_VALUES`` values: the process that decodes them serves other callers too.
    """
    return decode_with_extra(body, type)[0]


def decode_with_extra(body: bytes, type: type[T]) -> tuple[T, dict[str, Any]]:
    """Decode as ``decode`` does, and return beside it the top-level fields that ``type`` does not know."""
    value, extra, _ = _decode(body, type)
    return value, extra


def decode_with_unread(
    body: bytes, type: type[T], tells_unread: bool = True
) -> tuple[T, dict[str, Any], tuple[str, ...]]:
    """Decode as ``decode_with_extra`` does, and return as well the names of fields that ``type`` does not know further
    inside, such as ``messages.audio``: each once, the first of very many, and none that is null or empty. None unless
    ``tells_unread``."""
    value, extra, plain = _decode(body, type)
    return value, extra, unread_fields(plain, type) if tells_unread else ()


def _decode(body: bytes, type: type[T]) -> tuple[T, dict[str, Any], Any]:
    shape: Any = type
    decoder, known = _decoder(shape)
    plain = _parse(body)
    try:
        value: T = decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _wrong_field(str(exc), shape) from exc
    except msgspec.DecodeError as exc:  # the standard library read it, msgspec did not
        raise _not_json(str(exc)) from exc
    extra = {name: plain[name] for name in plain.keys() - known} if isinstance(plain, dict) else {}
    return value, extra, plain


def convert(fields: dict[str, Any], type: type[T], *, strict: bool = True) -> T:
    """Return decoded ``fields`` as ``type``, with the same errors as ``decode``; unless ``strict``, of texts, too, that
    stand for numbers and booleans."""
    try:
        return msgspec.convert(fields, type, strict=strict)
    except msgspec.ValidationError as exc:
        raise _wrong_field(str(exc), type) from exc


@cache
def _decoder(type: Any) -> tuple[msgspec.json.Decoder[Any], frozenset[str]]:
    known = frozenset(getattr(type, "__struct_encode_fields__", ()))
    return msgspec.json.Decoder(type), known


def _parse(body: bytes) -> Any:
    """Read the body whole, without types, to see what a typed decoder skips."""
    if has_more_values(body, MAX_VALUES):
        raise TooLarge(f"The body holds more than {MAX_VALUES} values. Send it in parts.")
    is_flat = body.count(b"{") + body.count(b"[") <= MAX_DEPTH
    try:
        # What comes out as it came in, but for white space, has no key twice and nothing that is read in two ways.
        if is_flat and msgspec.json.encode(plain := _plain.decode(body)) == msgspec.json.format(body, indent=-1):
            return plain
    except (*NOT_JSON, UnicodeEncodeError):
        pass  # the slow way says what is wrong
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        words = f"The body is not valid UTF-8 at byte {exc.start}. Send JSON encoded as UTF-8."
        raise BadRequest(words, code="invalid_json") from exc
    try:
        plain = _reader.decode(text)
        if not is_flat:
            _refuse_depth(plain)
        msgspec.json.encode(plain)  # what could not travel on is refused here: it costs 2 µs and looks everywhere
    except json.JSONDecodeError as exc:
        raise _not_json(f"{exc.msg} at line {exc.lineno}, column {exc.colno}") from exc
    except RecursionError as exc:
        raise _too_deep() from exc
    except UnicodeEncodeError as exc:
        words = "The body holds half of a surrogate pair (\\ud800 to \\udfff), which is no character."
        raise BadRequest(words, code="invalid_json") from exc
    except ValueError as exc:  # what the interpreter refuses to read: thousands of digits
        raise BadRequest("The body holds an integer that is too large.", code="invalid_value") from exc
    return plain


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse_duplicate(pairs)
    return found


def _refuse_duplicate(pairs: list[tuple[str, Any]]) -> NoReturn:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise BadRequest(
                f"The key {key!r} appears twice in one object. Send it once.", param=key, code="duplicate_key"
            )
        seen.add(key)
    raise AssertionError("no key appears twice")


def _refuse_constant(name: str) -> NoReturn:
    raise _not_json(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise BadRequest(f"The number {digits[:24]} is too large.", code="invalid_value")
    return number


# What a value begins with or is parted by, and all before it, in a body without escaped quotes. Nothing is read twice:
# no repeat gives back what it took.
_SEPARATOR = re.compile(rb'(?:[^",\[{]++|"[^"]*+(?:"|\Z))*+([,\[{])?')
_plain = msgspec.json.Decoder()
_reader = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)


def has_more_values(body: bytes, most: int) -> bool:
    """Whether a body has more than ``most`` commas, objects and arrays; counted no further than it takes to know.

    The time is linear in the body, and others have the interpreter every tenth of a second.
    """
    if len(body) <= most or body.count(b",") + body.count(b"[") + body.count(b"{") <= most:
        return False
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 4 * (most + 1):  # between two keys with their values stands a comma
        return True
    found, beyond = _SEPARATOR.finditer(body), None
    for start in range(0, most + 1, AT_ONCE):
        beyond = next(islice(found, min(AT_ONCE, most + 1 - start) - 1, None), None)
        if beyond is None:
            return False
    return beyond is not None and beyond.lastindex is not None


def _refuse_depth(plain: Any) -> None:
    level, depth = [plain], 0
    while level:
        inner = [item for item in level if isinstance(item, (dict, list))]
        depth += bool(inner)
        if depth > MAX_DEPTH:
            raise _too_deep()
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]


def _not_json(why: str) -> BadRequest:
    return BadRequest(f"The body is not valid JSON: {why}.", code="invalid_json")


def _too_deep() -> BadRequest:
    return BadRequest(f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")


_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_TOO_MANY = re.compile(r"Expected `array` of length <= (\d+)")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def _wrong_field(complaint: str, type: Any) -> BadRequest:
    """Turn msgspec's complaint and path, ``Expected `int`, got `str` - at `$.n```, into an error of the gateway."""
    match = _PATH.match(complaint)
    what, path = (match["what"], match["path"] or "") if match else (complaint, "")
    param = path.removeprefix(".")
    missing = _MISSING.fullmatch(what)
    if missing:
        param = f"{param}.{missing[1]}".removeprefix(".")
        return missing_param(param, f"Missing required parameter: '{param}'.").keeping(f"It lacks '{missing[1]}'.")
    if too_many := _TOO_MANY.fullmatch(what):
        words = f"'{param}' holds more than {too_many[1]} entries. Send fewer."
        return BadRequest(words, param=param, code="invalid_value")
    code = "invalid_type" if what.startswith("Expected `") else "invalid_value"
    words = re.sub(r"`(\w+)( \| \w+)*`", _plain_words, what)
    where = f"'{param}'" if param else "body"
    right = _right(what, type, path)
    error = BadRequest(f"Invalid {where}: {words[:1].lower()}{words[1:]}.{right}", param=param or None, code=code)
    kept = f"{words}.{right}" if code == "invalid_type" else right[1:]  # another complaint quotes the value
    return error.keeping(kept) if kept else error


def _right(what: str, type: Any, path: str) -> str:
    """Return what would have been right at a path of ``type``, where that is one of a few names."""
    is_tag = what.startswith("Invalid value '")  # of a union's member: its place is the object around it
    path, _, tag = path.rpartition(".") if is_tag else (path, "", "")
    places = [inspect.type_info(type)]
    for field, item in re.findall(r"\.([^.\[\]]+)|(\[)", path.replace("[...]", "[]")):
        places = [inner for place in _members(places) for inner in _inside(place, None if item else field)]
    places = list(_members(places))
    names: list[Any] = []
    if is_tag:
        names = [place.tag for place in places if isinstance(place, inspect.StructType) and place.tag_field == tag]
    if what.startswith("Invalid enum value"):
        for place in places:
            if isinstance(place, inspect.LiteralType):
                names += place.values
            elif isinstance(place, inspect.EnumType):
                names += [each.value for each in place.cls]
    elif what.startswith("Invalid RFC3339"):
        return " Send a moment such as 2027-01-31T00:00:00Z."
    elif what.startswith("Invalid decimal"):
        return " Send a number such as 12.5."
    elif what.startswith("Object contains unknown field"):
        names = [
            field.encode_name for place in places if isinstance(place, inspect.StructType) for field in place.fields
        ]
    return f" Known here: {', '.join(map(str, names))}." if names else ""


def _members(places: list[inspect.Type]) -> Iterator[inspect.Type]:
    for place in places:
        yield from place.types if isinstance(place, inspect.UnionType) else (place,)


def _inside(place: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """Yield what may stand in a field, or in an item where ``field`` is None."""
    match place:
        case inspect.StructType(fields=fields) if field is not None:
            yield from (each.type for each in fields if each.encode_name == field)
        case inspect.DictType(value_type=inner) if field is None:
            yield inner
        case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner) if field is None:
            yield inner


def _plain_words(match: re.Match[str]) -> str:
    return " or ".join(_WORDS.get(word, word) for word in match[0].strip("`").split(" | "))
