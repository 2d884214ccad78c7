# POST /v1/audio/transcriptions and its kin: inference endpoints whose body is a form with a file. The file is kept
# once, as it came, from its first byte until the call's end, and counts among the long bodies of its team for as long.

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from msgspec import Meta
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from gateway.accounts.guards import team_guard
from gateway.dialects.endpoint import ApiEndpoint
from gateway.dialects.options import Options
from gateway.dialects.parts.recordings import seconds_of
from gateway.dialects.table import ENDPOINTS
from gateway.http.exchange import LARGEST_BODY, AnyRequest, caller_of, part_of
from gateway.http.inference_port import inference_of
from gateway.http.inference_requests import call_of, note_model
from gateway.http.reply_response import ReplyResponse
from gateway.overload.body_memory import BodyRoom
from protocol.errors import BadRequest, TooLarge, invalid_value, missing_param
from protocol.media.audio import Recording
from protocol.serving.off_loop import off_loop

LARGEST_FILE = 25 * 1024 * 1024  # bytes, as OpenAI has it
LONGEST_FIELDS = 64 * 1024  # bytes of all fields together
MOST_PARTS = 64
LONGEST_NAME = 128  # characters


class Form:
    """One form as it arrives: its fields, and its file."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.file = bytearray()
        self._segment: MultipartSegment | None = None
        self._digest = hashlib.sha256()
        self._size = 0  # bytes of fields
        self._value = bytearray()

    def take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        """Take in what the parser found next. Raises BadRequest, TooLarge."""
        if isinstance(event, MultipartSegment):
            self._segment, self._value = event, bytearray()
            if event.name == "file" and "file" in self.fields:
                raise invalid_value("file", "comes once")
            if event.name == "file":
                self.fields["file"] = None
        elif event is None:
            if self._segment is not None and self._segment.name != "file":
                self._end_field(self._segment.name)
        elif self._segment is not None and self._segment.name == "file":
            if len(self.file) + len(event) > LARGEST_FILE:
                words = f"The file is longer than {LARGEST_FILE // 2**20} MiB. Send it in parts, or packed (mp3, ogg)."
                raise TooLarge(words, param="file")
            self.file += event
            self._digest.update(event)
            if self._segment.filename is not None:
                self.fields["file"] = (self._segment.filename, self._segment.content_type)
        else:
            self._size += len(event)
            if self._size > LONGEST_FIELDS:
                raise TooLarge(f"The fields of the form are longer than {LONGEST_FIELDS} bytes.")
            self._value += event

    def whole(self) -> dict[str, Any]:
        """Return the fields, the file as what is known of it. Raises BadRequest where there is none."""
        if not self.file:
            said = "file" in self.fields
            raise (
                invalid_value("file", "is empty")
                if said
                else missing_param(
                    "file", "Missing required parameter: 'file'. Send the recording as a file of the form."
                )
            )
        name, media_type = (said or "" for said in self.fields["file"] or (None, None))  # a part may say neither
        most, likely = seconds_of(self.file)
        facts = Recording(
            name=_plain(name.rpartition("/")[2]) or "recording",
            media_type=_plain(media_type) or "application/octet-stream",
            size=len(self.file),
            sha256=self._digest.hexdigest(),
            seconds_most=most,
            seconds_likely=likely,
        )
        return self.fields | {"file": msgspec.to_builtins(facts)}

    def _end_field(self, name: str) -> None:
        try:
            value = self._value.decode()
        except UnicodeDecodeError as exc:
            raise invalid_value(name[:50], "is not valid UTF-8") from exc
        plain = name.removesuffix("[]")
        known = self.fields.get(plain)
        if plain != name and isinstance(known, list):
            known.append(value)
        elif plain == "file" or plain in self.fields:
            raise invalid_value(plain[:50], "comes once")
        else:
            self.fields[plain] = value if plain == name else [value]


def _plain(text: str) -> str:
    """Return a text that may stand between quotes in a head."""
    return "".join(each for each in text if each.isascii() and each.isprintable() and each not in '"\\')[:LONGEST_NAME]


async def read_form(content_type: str, body: AsyncIterator[bytes]) -> Form:
    """Return a form, whole. Raises BadRequest, TooLarge."""
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data" or not options.get("boundary"):
        words = "Send the recording as multipart/form-data, with 'file' and 'model'."
        raise BadRequest(words, code="invalid_content_type")
    form = Form()
    try:
        with PushMultipartParser(options["boundary"], max_segment_count=MOST_PARTS) as parser:
            async for data in body:
                for event in parser.parse(data):
                    form.take(event)
    except MultipartError as exc:
        raise BadRequest(f"The form cannot be read: {exc.args[0]}.", code="invalid_form") from exc
    return form


class UploadResponse:
    """Reads a form and answers the call that it makes: an ASGI app, so that it has the room until the call's end."""

    def __init__(self, request: AnyRequest, endpoint: ApiEndpoint, body: AsyncIterator[bytes]) -> None:
        self._request, self._endpoint, self._body = request, endpoint, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises what refuses the form or the call."""
        request, endpoint = self._request, self._endpoint
        size = min(request.content_length or LARGEST_BODY, LARGEST_BODY)
        async with part_of(request, BodyRoom).taken(caller_of(request).team.id, size):
            form = await read_form(request.headers.get("content-type", ""), self._body)
            fields = await off_loop(len(form.file), form.whole)
            asked = endpoint.read_form(fields, lambda model: note_model(request, model))
            call = call_of(request, endpoint, asked, len(form.file), memoryview(form.file))
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
        takes=_described(endpoint.body_type),
        body_type="multipart/form-data",
        options=Options,
    )
    return declare(answer_upload)


def _described(kind: type[Any]) -> type[msgspec.Struct]:
    """Return the form as the API's description shows it."""
    file = Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    fields = [
        (each.name, file) if each.name == "file" else (each.name, each.type, each.default)
        for each in msgspec.structs.fields(kind)
    ]
    return msgspec.defstruct(kind.__name__.replace("Request", "Form"), fields, kw_only=True)


handlers = [route_of(endpoint) for endpoint in ENDPOINTS if endpoint.is_form]
