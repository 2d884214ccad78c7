# Takes a file in as multipart/form-data (RFC 7578), a chunk at a time: neither memory nor a gateway's disk holds it.

from __future__ import annotations

from collections.abc import AsyncIterator

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from gateway.batch.file_store import CHUNK, FileRecord, add_chunk, begin_file, drop_file, end_file
from gateway.batch.limits import check_storage, lock_limits
from gateway.batch.shapes import LARGEST_FILE
from gateway.core.settings import BatchLimits
from gateway.storage.database import Database
from protocol.errors import BadRequest, ServiceError, TooLarge, invalid_value, missing_param

FORM_ROOM = 64 * 1024  # bytes of a form beside the file
LONGEST_FIELD = 1024  # bytes
MOST_PARTS = 16  # fields and the file
PURPOSES = ("batch",)


class _Upload:
    """One form as it arrives: its fields, and its file on the way into Postgres."""

    def __init__(self, database: Database, team_id: str, limits: BatchLimits) -> None:
        self.fields: dict[str, str] = {}
        self.file_id: str | None = None
        self.size = 0
        self._database = database
        self._team_id = team_id
        self._limits = limits
        self._segment: MultipartSegment | None = None
        self._rest = bytearray()
        self._position = 0

    async def take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        """Take in what the parser found next."""
        match event:
            case MultipartSegment():
                self._segment = event
                if event.name == "file":
                    if self.file_id is not None:
                        raise invalid_value("file", "comes once")
                    name = (event.filename or "upload.jsonl").rpartition("/")[2][:255]
                    async with self._database.begin() as connection:
                        self.file_id = await begin_file(connection, self._team_id, name.replace("\x00", ""), "batch")
                else:
                    self.fields[event.name] = ""
            case None:
                if self._segment is not None and self._segment.name == "file":
                    await self._store()
            case _:
                assert self._segment is not None
                if self._segment.name == "file":
                    await self._add(bytes(event))
                else:
                    self._add_to_field(self._segment.name, bytes(event))

    async def _add(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > LARGEST_FILE:
            raise TooLarge(f"The file is longer than {LARGEST_FILE // 2**20} MiB. Send it as several batches.")
        self._rest += data
        while len(self._rest) >= CHUNK:
            await self._store(CHUNK)

    async def _store(self, most: int = CHUNK) -> None:
        if self._rest and self.file_id is not None:
            data = bytes(self._rest[:most])
            del self._rest[:most]
            async with self._database.begin() as connection:
                await check_storage(connection, self._limits, self._team_id, len(data))
                await add_chunk(connection, self.file_id, self._position, data)
            self._position += 1

    def _add_to_field(self, name: str, data: bytes) -> None:
        said = self.fields[name] + data.decode(errors="replace")
        if len(said) > LONGEST_FIELD:
            raise invalid_value(name[:50], f"is longer than {LONGEST_FIELD} characters")
        self.fields[name] = said


async def receive_file(
    database: Database, team_id: str, content_type: str, body: AsyncIterator[bytes], keep: float, limits: BatchLimits
) -> FileRecord:
    """Store an uploaded file for ``keep`` seconds and return it. Raises BadRequest, TooLarge, StorageFull.

    The chunks of a refused upload are dropped at once; of an aborted one, after an hour.
    """
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data" or not options.get("boundary"):
        raise BadRequest(
            "Send the file as multipart/form-data, with 'file' and 'purpose'.", code="invalid_content_type"
        )
    async with database.begin() as connection:  # before the body is sent in vain
        await check_storage(connection, limits, team_id, 1)
    upload = _Upload(database, team_id, limits)
    try:
        await _receive(upload, options["boundary"], body)
        file_id = _file_of(upload)
        async with database.begin() as connection:
            await lock_limits(connection, team_id)
            await check_storage(connection, limits, team_id, 0)  # it is among them now
            return await end_file(connection, file_id, upload.size, keep)
    except ServiceError:
        if upload.file_id is not None:
            async with database.begin() as connection:
                await drop_file(connection, upload.file_id)
        raise


async def _receive(upload: _Upload, boundary: str, body: AsyncIterator[bytes]) -> None:
    try:
        with PushMultipartParser(boundary, max_segment_count=MOST_PARTS) as parser:
            async for data in body:
                for event in parser.parse(data):
                    await upload.take(event)
    except MultipartError as exc:
        raise BadRequest(f"The form cannot be read: {exc.args[0]}.", code="invalid_form") from exc


def _file_of(upload: _Upload) -> str:
    """Return the file of a form that came whole. Raises BadRequest where something is missing."""
    if upload.fields.get("purpose") not in PURPOSES:
        raise invalid_value("purpose", f"is {' or '.join(PURPOSES)}")
    if upload.file_id is None:
        raise missing_param("file", "Missing required parameter: 'file'.")
    if not upload.size:
        raise invalid_value("file", "is empty")
    return upload.file_id
