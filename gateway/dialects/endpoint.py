# What an inference endpoint is: its path, what it takes and refuses, how it writes replies and errors, and where else
# its requests may come from. Each dialect's file has one row of this type; table.py holds them all.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from billing.core.holds import Hold, RefusedHold, Settlement
from billing.core.records import UsageRecord
from gateway.calls.call import Call
from gateway.calls.rate_limits import rate_limit_headers
from gateway.core.errors import RpcError
from protocol.decoding import convert, decode_with_unread
from protocol.errors import ServiceError
from protocol.events import Event
from protocol.inference import NativeRequest, Request, WholeReply
from protocol.responses import ResponsesRequest
from protocol.usage import Usage
from router.catalog.targets import Target


class Metered(Protocol):
    """What counts a reply's tokens as they come."""

    def so_far(self) -> Settlement:
        """Return what the call has used by now."""


class ReplyFacts(Protocol):
    """What a writer tells of the reply that it writes."""

    call: Call
    dropped: tuple[str, ...]  # fields of the request that had no effect, as a chat calls them

    @property
    def target(self) -> Target:
        """Which model answers."""

    @property
    def record(self) -> UsageRecord:
        """What the call used, once that is known."""

    @property
    def meter(self) -> Metered:
        """What it has used before that."""


class ReplyWriter(Protocol):
    """How one API writes replies. One object per call; it may keep what the stream needs to remember."""

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return the body of a plain answer."""

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the bytes of a stream that stand for events which came together."""

    def error(self, error: ServiceError) -> bytes:
        """Return the bytes that tell a client in mid-stream that its reply broke."""


class WholeWriter:
    """A writer of replies that are never streamed."""

    def __init__(self, request: Any, request_id: str, created: int) -> None:
        self._request, self._id, self._created = request, request_id, created

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Nothing comes in pieces."""
        raise AssertionError("a request of this endpoint has no stream")

    def error(self, error: ServiceError) -> bytes:
        """Nothing comes in pieces."""
        raise AssertionError("a request of this endpoint has no stream")


class ErrorDetails(Struct):
    """What went wrong: a message to read, and stable codes for programs."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str  # the x-request-id of the answer
    model: str | UnsetType = UNSET  # where an upstream failed: which model,
    endpoint: str | UnsetType = UNSET  # and at which provider and region


class Error(Struct):
    """Every error but those of Anthropic's dialect, which has its own shape."""

    error: ErrorDetails


class ErrorShape(Struct, frozen=True, kw_only=True):
    """How an API tells errors. ``body`` makes one of an error and the request's id."""

    body: Callable[[ServiceError, str], Any]
    schema: type[Struct]
    client_header: str | None = None  # which the API's clients always send, whatever URL they call
    id_header: bytes | None = None  # the API's own name for x-request-id, sent beside it


OPENAI_ERRORS = ErrorShape(body=ServiceError.body, schema=Error)


class RpcFault(Struct, frozen=True):
    """The error of an answer in JSON-RPC; ``data`` has the ``code``, ``status`` and ``request_id`` of other APIs."""

    code: int
    message: str
    data: Any


class RpcErrorAnswer(Struct, frozen=True):
    """An answer that is an error."""

    jsonrpc: str
    id: str | int | None
    error: RpcFault


def rpc_error(error: ServiceError, request_id: str = "", ident: str | int | None = None) -> RpcErrorAnswer:
    """Return an error as JSON-RPC tells it, as the answer to the request ``ident``; -32000: it has no code for that."""
    data: Any = error.data if isinstance(error, RpcError) else None
    if data is None:
        data = {"code": error.code, "status": error.status, "request_id": request_id}
        if wait := error.headers.get("retry-after"):
            data["retry_after"] = int(wait)
    code = error.rpc_code if isinstance(error, RpcError) else -32600 if error.status == 400 else -32000
    return RpcErrorAnswer("2.0", ident, RpcFault(code, error.message, data))


RPC_ERRORS = ErrorShape(body=rpc_error, schema=RpcErrorAnswer)


class Asked(Struct, frozen=True):
    """A body as it was decoded: the request for the pipeline, and the fields unknown to us."""

    request: Request
    extra: dict[str, Any]
    native: NativeRequest | None = None  # the body in its API's own form, where that is not the pipeline's
    unread: tuple[str, ...] = ()  # names of fields further inside that are unknown to us
    goes_on: bool = False  # whether stored items are to be read before it is whole
    shown: ResponsesRequest | None = None  # a response with all that a model is shown, turns before included


class ApiEndpoint(Struct, frozen=True, kw_only=True):
    """An inference endpoint."""

    path: str
    name: str  # in the ledger and in traces
    operation: str  # in /openapi.json, as are the next two
    summary: str
    description: str
    body_type: type[Any]
    check: Callable[[Any], None]  # refuses what the type lets through; raises BadRequest
    translate: Callable[[Any, dict[str, Any]], Asked] = Asked
    with_headers: Callable[[Any, Mapping[str, str]], Any] = lambda native, _: native  # what they say joins the body
    writer: Callable[[Any, str, int], ReplyWriter]  # of the body in the API's own form, the request's id, unix seconds
    errors: ErrorShape = OPENAI_ERRORS
    field_names: Mapping[str, str] = {}  # of fields that a chat calls otherwise, by a chat's names
    media_type: Callable[[Any], str | None] = lambda _: None  # of an answer that is neither JSON nor events
    limit_headers: Callable[[Hold | RefusedHold, float], dict[str, str]] = lambda held, _: rate_limit_headers(held)
    tells_unread: bool = True  # of fields inside of items that are unknown to us; else those mean nothing there
    has_memory: bool = False  # what it answers may be stored, and gone on from
    is_for_batches: bool
    files: Mapping[str, int] = {}  # a body is multipart/form-data: its fields that bring files, and how many each does
    takes_json: bool = False  # or JSON, with data URLs in their place
    route_field: str | None  # of a body, by which /v1/route tells that it is of this endpoint; None: it takes none
    route_signs: frozenset[str] = frozenset()  # other fields, each of which tells it from endpoints of the same one

    def read(self, body: bytes, note_model: Callable[[str], None] | None = None) -> Asked:
        """Decode and check a body; ``note_model`` is told which model it asks for. Raises BadRequest and its kin."""
        asked, extra, unread = decode_with_unread(body, self.body_type, self.tells_unread)
        if note_model is not None:
            note_model(asked.model)
        self.check(asked)
        told = self.translate(asked, extra)
        return replace(told, unread=unread) if unread else told

    def read_form(self, fields: dict[str, Any], note_model: Callable[[str], None]) -> Asked:
        """Check what a form says, each field a text or a list of them. Raises as ``read`` does."""
        known = self.body_type.__struct_encode_fields__
        asked = convert({name: fields[name] for name in fields if name in known}, self.body_type, strict=False)
        note_model(asked.model)
        self.check(asked)
        return self.translate(asked, {name: fields[name] for name in fields if name not in known})

    def names_of(self, fields: Iterable[str]) -> list[str]:
        """Return names of fields as this API's callers know them."""
        return [self.field_names.get(name, name) for name in fields]

    def writer_of(self, call: Call) -> ReplyWriter:
        """Return what writes the reply to ``call``."""
        return self.writer(call.native or call.request, call.request_id, int(call.created_at))
