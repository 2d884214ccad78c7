# POST /v1/audio/transcriptions, /v1/images/edits and their kin: inference endpoints whose body is a form with files, or
# JSON that holds them as data URLs. They are kept once, as they came, from their first byte until the call's end, and
# count among the long bodies of their team for as long.

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from msgspec import Meta
from msgspec.structs import replace
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from gateway.accounts.guards import team_guard
from gateway.dialects.endpoint import ApiEndpoint, Asked
from gateway.dialects.options import Options
from gateway.dialects.parts.recordings import seconds_of
from gateway.dialects.table import ENDPOINTS
from gateway.http.exchange import LARGEST_BODY, AnyRequest, caller_of, part_of
from gateway.http.inference_port import inference_of
from gateway.http.inference_requests import call_of, deployment_of, note_model, with_deployment
from gateway.http.reply_response import ReplyResponse
from gateway.overload.body_memory import BodyRoom
from protocol.decoding import convert, decode_with_unread
from protocol.errors import BadRequest, TooLarge, UnsupportedParameter, invalid_value
from protocol.media.images import (
    MOST_EDITED,
    MOST_HEADER,
    ImageEditBody,
    ImageEditRequest,
    PictureFile,
    PictureRef,
    media_type_in,
    size_in,
)
from protocol.serving.off_loop import off_loop

LARGEST_FILES = 25 * 1024 * 1024  # bytes of all files of a form together, as OpenAI has it of a recording
LONGEST_FIELDS = 256 * 1024  # bytes of all fields together: 32,000 characters of a prompt may have 128,000
MOST_PARTS = 64
LONGEST_NAME = 128  # characters
LONGEST_BOUNDARY = 256  # characters: RFC 2046 has 70; the parser keeps as much of each piece


class File:
    """A file of a form as it arrives."""

    def __init__(self, name: str | None = None, media_type: str | None = None) -> None:
        self.data = bytearray()
        self._name, self._media_type = name or "", media_type or ""  # a part may say neither
        self._digest = hashlib.sha256()

    def add(self, data: bytes | bytearray) -> None:
        """Take in what comes next."""
        self.data += data
        self._digest.update(data)

    def facts(self, field: str) -> dict[str, Any]:
        """Return what is known of it, with what it tells itself. Raises BadRequest where it is empty."""
        if not self.data:
            raise invalid_value(field, "is empty")
        return {
            "name": _plain(self._name.rpartition("/")[2]) or field.partition("[")[0],
            "media_type": _plain(self._media_type) or "application/octet-stream",
            "size": len(self.data),
            "sha256": self._digest.hexdigest(),
            **(self._heard() if field == "file" else self._seen(field)),
        }

    def _heard(self) -> dict[str, Any]:
        most, likely = seconds_of(self.data)
        return {"seconds_most": most, "seconds_likely": likely}

    def _seen(self, field: str) -> dict[str, Any]:
        kind = media_type_in(self.data)
        is_drawn = field.startswith("ma")  # a mask or a markup
        if kind is None or (is_drawn and kind != "image/png"):
            raise invalid_value(field, "is no PNG" if is_drawn else "is no PNG, JPEG or WebP")
        pixels = size_in(bytes(self.data[:MOST_HEADER]))
        return {"media_type": kind, "pixels": pixels if pixels and min(pixels) > 0 else None}


class Form:
    """One form as it arrives: its fields, and the files of those that bring some."""

    def __init__(self, most: Mapping[str, int]) -> None:
        self.fields: dict[str, Any] = {}
        self.files: dict[str, list[File]] = {name: [] for name in most}
        self._most = most  # files of each field
        self._segment: MultipartSegment | None = None
        self._file: File | None = None
        self.size = 0  # bytes of files,
        self._size_of_fields = 0
        self._value = bytearray()

    def take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        """Take in what the parser found next. Raises BadRequest, TooLarge."""
        if isinstance(event, MultipartSegment):
            self._begin(event)
        elif event is None:
            if self._segment is not None and self._file is None:
                self._end_field(self._segment.name)
        elif self._file is not None:
            self.size += len(event)
            if self.size > LARGEST_FILES:
                raise _too_large(next(iter(self._most)))
            self._file.add(event)
        else:
            self._size_of_fields += len(event)
            if self._size_of_fields > LONGEST_FIELDS:
                raise TooLarge(f"The fields of the form are longer than {LONGEST_FIELDS} bytes.")
            self._value += event

    def whole(self) -> dict[str, Any]:
        """Return the fields, the files as what is known of them. Raises BadRequest for one that is not what it has to
        be."""
        facts = {name: [file.facts(name) for file in files] for name, files in self.files.items() if files}
        return self.fields | {name: each if self._most[name] > 1 else each[0] for name, each in facts.items()}

    @property
    def bytes(self) -> tuple[memoryview, ...]:
        """Return what the files hold, field by field."""
        return tuple(memoryview(file.data) for files in self.files.values() for file in files)

    def _begin(self, segment: MultipartSegment) -> None:
        self._segment, self._file, self._value = segment, None, bytearray()
        name = segment.name.removesuffix("[]")
        if (files := self.files.get(name)) is not None:
            if len(files) == (most := self._most[name]):
                raise invalid_value(name, "comes once" if most == 1 else f"comes at most {most} times")
            self._file = File(segment.filename, segment.content_type)
            files.append(self._file)
        elif segment.filename is not None:
            raise invalid_value(name[:50], f"takes no file. Fields that do: {', '.join(map(repr, self._most))}")

    def _end_field(self, name: str) -> None:
        try:
            value = self._value.decode()
        except UnicodeDecodeError as exc:
            raise invalid_value(name[:50], "is not valid UTF-8") from exc
        plain = name.removesuffix("[]")
        known = self.fields.get(plain)
        if plain != name and isinstance(known, list):
            known.append(value)
        elif plain in self.fields:
            raise invalid_value(plain[:50], "comes once")
        else:
            self.fields[plain] = value if plain == name else [value]


def _too_large(param: str) -> TooLarge:
    most = LARGEST_FILES // 2**20
    words = f"The files are longer than {most} MiB. Send less at a time, or packed (mp3, ogg; jpeg, webp)."
    return TooLarge(words, param=param)


def _plain(text: str) -> str:
    """Return a text that may stand between quotes in a head."""
    return "".join(each for each in text if each.isascii() and each.isprintable() and each not in '"\\')[:LONGEST_NAME]


async def read_form(content_type: str, body: AsyncIterator[bytes], most: Mapping[str, int]) -> Form:
    """Return a form, whole; ``most``: how many files its fields bring that do. Raises BadRequest, TooLarge."""
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data" or not 0 < len(options.get("boundary", "")) <= LONGEST_BOUNDARY:
        words = f"Send multipart/form-data, with its boundary, '{next(iter(most))}' and 'model'."
        raise BadRequest(words, code="invalid_content_type")
    form = Form(most)
    try:
        with PushMultipartParser(options["boundary"], max_segment_count=MOST_PARTS) as parser:
            async for data in body:
                for event in parser.parse(data):
                    form.take(event)
    except MultipartError as exc:
        raise BadRequest(f"The form cannot be read: {exc.args[0]}.", code="invalid_form") from exc
    return form


class Body:
    """An edit of pictures in JSON, as it is read: those that come along as data URLs are its files."""

    def __init__(self) -> None:
        self.size = 0  # bytes of them
        self.bytes: list[memoryview] = []

    def asked(self, body: bytes, endpoint: ApiEndpoint, request: AnyRequest) -> Asked:
        """Return what a body asks. Raises BadRequest and its kin."""
        body = with_deployment(request, body)
        said, extra, unread = decode_with_unread(body, ImageEditBody, endpoint.tells_unread)
        note_model(request, said.model)
        if not 0 < len(said.images) <= MOST_EDITED:
            raise invalid_value("images", f"must hold 1 to {MOST_EDITED} pictures")
        pictures = [self._picture(ref, f"images[{place}]") for place, ref in enumerate(said.images)]
        drawn = {name: getattr(said, name) for name in ("mask", "markup")}
        drawn = {name: None if ref is None else self._picture(ref, name) for name, ref in drawn.items()}
        told = msgspec.structs.asdict(said) | drawn
        edit = ImageEditRequest(**{name: told[name] for name in told if name != "images"}, image=tuple(pictures))
        endpoint.check(edit)
        return replace(endpoint.translate(edit, extra), unread=unread)

    def _picture(self, ref: PictureRef, field: str) -> PictureFile:
        if ref.file_id is not None or ref.image_url is None:
            words = "Pictures are not kept here as files: send 'image_url', a data URL or an https address."
            raise UnsupportedParameter(f"'{field}' has no picture. {words}", param=f"{field}.file_id")
        if ref.image_url.startswith("https://"):
            return PictureFile(url=ref.image_url)
        head, found, data = ref.image_url.partition(";base64,")
        self.size += len(data) * 3 // 4
        if self.size > LARGEST_FILES:
            raise _too_large(field)
        file = File()
        try:
            file.add(base64.b64decode(data, validate=True) if found and head.startswith("data:image/") else b"")
        except ValueError:  # a sign that is not of base64, or not of ASCII
            file = File()
        if not file.data:
            raise invalid_value(f"{field}.image_url", "must be a data URL of a picture in base64, or an https address")
        self.bytes.append(memoryview(file.data))
        return convert(file.facts(field), PictureFile)


class UploadResponse:
    """Reads a form and answers the call that it makes: an ASGI app, so that it has the room until the call's end."""

    def __init__(self, request: AnyRequest, endpoint: ApiEndpoint, body: AsyncIterator[bytes]) -> None:
        self._request, self._endpoint, self._body = request, endpoint, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises what refuses the form or the call."""
        request, endpoint = self._request, self._endpoint
        size = min(request.content_length or LARGEST_BODY, LARGEST_BODY)
        async with part_of(request, BodyRoom).taken(caller_of(request).team.id, size):
            kind = request.headers.get("content-type", "")
            if endpoint.takes_json and kind.startswith("application/json"):
                body, data = Body(), b"".join([piece async for piece in self._body])
                asked = await off_loop(len(data), partial(body.asked, data, endpoint, request))
                call = call_of(request, endpoint, asked, len(data), tuple(body.bytes))
                del data
            else:
                form = await read_form(kind, self._body, endpoint.files)
                fields = await off_loop(form.size, form.whole)
                if (deployment := deployment_of(request)) is not None:
                    fields["model"] = deployment
                asked = endpoint.read_form(fields, partial(note_model, request))
                call = call_of(request, endpoint, asked, form.size, form.bytes)
            await ReplyResponse(inference_of(request), call, endpoint.writer_of(call))(scope, receive, send)


def route_of(endpoint: ApiEndpoint) -> HTTPRouteHandler:
    """Return the route that answers calls to ``endpoint``."""

    async def answer_upload(request: AnyRequest) -> ASGIApp:
        return UploadResponse(request, endpoint, request.stream())

    answer_upload.__name__, answer_upload.__doc__ = endpoint.operation, endpoint.description
    declare = post(
        endpoint.path,
        guards=[team_guard],
        status_code=200,
        summary=endpoint.summary,
        takes=_described(endpoint),
        body_type="multipart/form-data",
        options=Options,
    )
    return declare(answer_upload)


def _described(endpoint: ApiEndpoint) -> type[msgspec.Struct]:
    """Return the form as the API's description shows it."""
    file = Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    kind, kinds = endpoint.body_type, {name: list[file] if most > 1 else file for name, most in endpoint.files.items()}
    fields = [(each.name, kinds.get(each.name, each.type), each.default) for each in msgspec.structs.fields(kind)]
    return msgspec.defstruct(kind.__name__.replace("Request", "Form"), fields, kw_only=True)


handlers = [route_of(endpoint) for endpoint in ENDPOINTS if endpoint.files]
