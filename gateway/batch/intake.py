# Reads the input of a batch, line by line and in bounded memory. Every fault is reported with its line; a request's
# own body is only checked as JSON here, the rest is for the endpoint that it goes to.

from __future__ import annotations

import codecs
import re
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Raw, Struct

from gateway.batch.shapes import (
    LONGEST_CUSTOM_ID,
    LONGEST_LINE,
    LONGEST_MODEL,
    MOST_LINES,
    MOST_REQUESTS,
    Fault,
    InputLine,
    Item,
)
from protocol.decoding import decode
from protocol.errors import ServiceError

MOST_FAULTS = 50  # reported per input: the first ones are enough to correct it


class _Body(Struct):
    model: str


class _Head(Struct):
    """The fields around a body, checked only for what JSON parsers could read in two ways."""


class _Faulty(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        self.code, self.message, self.param = code, message, param


_LINE = msgspec.json.Decoder(InputLine)
_BODY = msgspec.json.Decoder(_Body)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_FIELD = re.compile(r"`\$\.?([^`\[]*)")


class Intake:
    """Checks the requests of one batch. ``faults`` holds the first of what is wrong; then nothing of it runs."""

    def __init__(self, endpoint: str, body_name: str | None = None) -> None:
        self.faults: list[Fault] = []
        self.count = 0
        self._endpoint = endpoint
        self._body_name = body_name or "body"
        self._takes_bare = body_name is None
        self._line = 0
        self._models: set[str] = set()  # up to two of them
        self._seen: set[bytes] = set()  # digests of custom ids: 16 bytes each, however long they are

    @property
    def is_full(self) -> bool:
        """Whether reading on is of no use: too many requests, lines or faults."""
        return self._is_too_long or len(self.faults) >= MOST_FAULTS

    @property
    def _is_too_long(self) -> bool:
        return self.count > MOST_REQUESTS or self._line > MOST_LINES

    @property
    def model(self) -> str | None:
        """The model that all requests name, if they do."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def line(self, line: bytes) -> Item | None:
        """Return the request in the next line of a file; None for an empty line, or one with a fault."""
        self._line += 1
        if self._line == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # as some editors write it
        return self._unless_faulty(self._read_line, line) if line.strip() else None

    def request(self, said: Raw) -> Item | None:
        """Return the next request of ``POST /v1/batch``: with a custom_id, or bare, named by its place from 1."""
        self._line += 1
        return self._unless_faulty(self._read_request, said)

    def too_long(self) -> None:
        """Note that the next line is longer than any that is read."""
        self._line += 1
        told = f"This line is longer than {LONGEST_LINE // 2**20} MiB."
        self.faults.append(Fault(code="line_too_long", line=self._line, message=told))

    def end(self) -> None:
        """Note what can only be said of the whole."""
        if self._is_too_long:
            told = f"The batch has more than {MOST_REQUESTS} requests, or {MOST_LINES} lines. Send several."
            self.faults.append(Fault(code="too_many_requests", line=None, message=told))
        elif not self.count and not self.faults:
            self.faults.append(Fault(code="empty_batch", line=None, message="The batch has no request."))

    def _unless_faulty(self, read: Callable[[Any], Item | None], said: Any) -> Item | None:
        try:
            return read(said)
        except _Faulty as exc:
            if len(self.faults) < MOST_FAULTS:
                self.faults.append(Fault(code=exc.code, line=self._line, message=f"{exc.message}.", param=exc.param))
        except RecursionError:
            told = "This request is nested too deeply."
            self.faults.append(Fault(code="invalid_json_line", line=self._line, message=told))
        return None

    def _read_line(self, line: bytes) -> Item | None:
        try:
            said = _LINE.decode(line)
        except msgspec.ValidationError as exc:
            field = _FIELD.search(str(exc))
            told = f"{exc}. A line has custom_id, method, url and body"
            raise _Faulty("invalid_line", told, field[1] if field else None) from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise _Faulty("invalid_json_line", f"This line is not valid JSON: {exc}") from exc
        if said.method.upper() != "POST":
            raise _Faulty("invalid_method", f"'method' is POST, not {said.method[:20]!r}", "method")
        if said.url != self._endpoint:
            told = f"'url' is {said.url[:100]!r} and the batch's endpoint {self._endpoint!r}: they must be the same"
            raise _Faulty("mismatched_url", told, "url")
        body = bytes(said.body)
        model = _model_of(body)
        _refuse_duplicates(line, body)
        return self._item(said.custom_id, body, model)

    def _read_request(self, said: Raw) -> Item | None:
        name, bare = self._body_name, " or bare" if self._takes_bare else ""
        try:
            fields = _FIELDS.decode(said)
            if name in fields and fields.keys() <= {"custom_id", name}:
                custom_id = msgspec.json.decode(fields.get("custom_id", Raw(b"null")), type=str | None)
                body = bytes(fields[name])
                model = _model_of(body, name)
                _refuse_duplicates(bytes(said), body)
                if custom_id is not None or self._takes_bare:
                    return self._item(str(self._line) if custom_id is None else custom_id, body, model)
        except msgspec.DecodeError as exc:
            told = f"A request is an object, with custom_id and {name}{bare}: {exc}"
            raise _Faulty("invalid_request", told) from exc
        if not self._takes_bare:
            raise _Faulty("invalid_request", f"A request has 'custom_id' and '{name}', and nothing else")
        return self._item(str(self._line), bytes(said), _model_of(bytes(said)))

    def _item(self, custom_id: str, body: bytes, model: str) -> Item | None:
        if not 1 <= len(custom_id) <= LONGEST_CUSTOM_ID or "\x00" in custom_id:
            told = f"'custom_id' has 1 to {LONGEST_CUSTOM_ID} characters, none of them NUL"
            raise _Faulty("invalid_custom_id", told, "custom_id")
        digest = blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            told = f"The custom_id {custom_id[:100]!r} was used before in this batch. Each must be unique"
            raise _Faulty("duplicate_custom_id", told, "custom_id")
        if len(self._models) < 2:
            self._models.add(model)
        self._seen.add(digest)
        self.count += 1
        return Item(custom_id, body) if self.count <= MOST_REQUESTS else None


def _model_of(body: bytes, name: str = "body") -> str:
    """Return the model that a body names. Raises _Faulty."""
    try:
        model = _BODY.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _Faulty("invalid_body", f"'{name}' must be a JSON object that names a model: {exc}", name) from exc
    if not 1 <= len(model) <= LONGEST_MODEL or "\x00" in model:
        raise _Faulty("invalid_body", f"'model' has 1 to {LONGEST_MODEL} characters, none of them NUL", name)
    return model


def _refuse_duplicates(line: bytes, body: bytes) -> None:
    """Raise _Faulty if a key appears twice around ``body``, an object: those inside are for the endpoint to see."""
    around = line.replace(body, b"0", 1)
    try:
        if around.count(b":") == len(_FIELDS.decode(around)):  # the usual line is flat, and nothing was passed over
            return
        decode(around, _Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _Faulty("invalid_json_line", f"This line is not valid JSON: {exc}") from exc
    except ServiceError as exc:
        code = "duplicate_key" if exc.code == "duplicate_key" else "invalid_json_line"
        raise _Faulty(code, exc.message.rstrip("."), exc.param) from exc


async def read_lines(chunks: AsyncIterator[bytes], intake: Intake) -> AsyncIterator[bytes]:
    """Yield the lines of a file from its chunks. A line that is too long is reported to ``intake`` and skipped."""
    rest, is_skipping = bytearray(), False
    async for chunk in chunks:
        *ends, beginning = chunk.split(b"\n")
        for end in ends:
            if rest:
                rest += end
                yield bytes(rest)
            elif not is_skipping:
                yield end
            is_skipping = False
            rest.clear()
        if not is_skipping:
            rest += beginning
        if len(rest) > LONGEST_LINE:
            intake.too_long()
            is_skipping = True
            rest.clear()
    if rest and not is_skipping:
        yield bytes(rest)
