# The Batch APIs of the scripted upstream: OpenAI's and Azure's files and batches, Anthropic's message batches, Gemini's
# batchGenerateContent. Strict in what they take; what goes wrong is said beforehand in ``fault``.

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.support.openai_rules import Violation

OPENAI = re.compile(r"(?:/v1|/openai)/(files|batches)(?:/([^/?]+))?(?:/(content|cancel))?(?:\?.*)?")
ANTHROPIC = re.compile(r"/v1/messages/batches(?:/([^/?]+))?(?:/(results|cancel))?(?:\?.*)?")
GEMINI_MAKE = re.compile(r"/v1beta/models/([^/:?]+):batchGenerateContent")
GEMINI = re.compile(r"/v1beta/batches(?:/([^/:?]+))?(?::(cancel))?(?:\?.*)?")
DISPOSITION = re.compile(rb'name="([^"]+)"')

# How a body of one request is answered: the path of a plain call, and the body; a status and a body come back.
Answer = Callable[[str, bytes, str], tuple[int, dict[str, Any]]]


@dataclass
class BatchFault:
    """What goes wrong, with all batches from now on. Lines go by their places, from 0."""

    end: str = "completed"  # or "expired", "failed", "never": running until it is cancelled
    looks: int = 1  # after which it has ended
    missing: frozenset[int] = frozenset()  # no word of these lines
    errors: frozenset[int] = frozenset()  # lines that ended in an error
    backwards: bool = False
    twice: bool = False  # every line comes two times
    foreign: bool = False  # a line comes that nobody sent
    unnamed: bool = False  # Gemini's answers have no keys
    code: str | None = None  # of a batch that failed
    refuse: list[int] = field(default_factory=list)  # statuses of the next attempts to make a batch
    after_taking: bool = False  # they are told although the batch was made
    cut_results: int = 0  # so many times the results break off in the middle
    away: bool = False  # nothing is told of any batch: 503


@dataclass
class Made:
    """A batch as it was made."""

    id: str
    dialect: str
    name: str | None
    lines: list[tuple[str, int, dict[str, Any]]]  # custom ids, statuses and bodies, as a plain call would have them
    created_at: float
    fault: BatchFault
    input_file: str = ""
    looks: int = 0
    cancelled: bool = False

    @property
    def state(self) -> str:
        """Return how it ended; "running" while it has not."""
        if self.cancelled:
            return "cancelled"
        return "running" if self.fault.end == "never" or self.looks < self.fault.looks else self.fault.end

    def results(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Return the lines that have something to tell, as they come."""
        if self.state == "failed":
            return []
        half = len(self.lines) // 2 if self.state in ("cancelled", "expired") else len(self.lines)
        told = [line for place, line in enumerate(self.lines) if place not in self.fault.missing and place < half]
        told = [(name, 500 if self._place(name) in self.fault.errors else status, body) for name, status, body in told]
        if self.fault.backwards:
            told.reverse()
        if self.fault.foreign:
            told.insert(0, ("nobody-sent-this", 200, self.lines[0][2]))
        return [line for line in told for _ in range(2 if self.fault.twice else 1)]

    def _place(self, name: str) -> int:
        return next(place for place, line in enumerate(self.lines) if line[0] == name)


class BatchDesk:
    """The files and batches of one scripted upstream. ``answer`` answers the lines."""

    def __init__(self, answer: Answer, now: Callable[[], float]) -> None:
        self.fault = BatchFault()
        self.made: list[Made] = []
        self.files: dict[str, bytes] = {}
        self.deleted: list[str] = []
        self._answer = answer
        self._now = now

    def takes(self, path: str) -> bool:
        """Whether a path is one of a Batch API."""
        return any(one.fullmatch(path) for one in (OPENAI, ANTHROPIC, GEMINI_MAKE, GEMINI))

    def serve(self, method: str, path: str, headers: Mapping[str, str], raw: bytes) -> tuple[int, bytes]:
        """Return the status and the body of an answer. Raises Violation."""
        if self.fault.away and method == "GET":
            return 503, b'{"error":{"message":"scripted"}}'
        if (found := ANTHROPIC.fullmatch(path)) is not None:
            return self._anthropic(method, headers, raw, *found.groups())
        if (found := GEMINI_MAKE.fullmatch(path)) is not None:
            return self._gemini_make(found[1], raw)
        if (found := GEMINI.fullmatch(path)) is not None:
            return self._gemini(method, *found.groups())
        found = OPENAI.fullmatch(path)
        assert found is not None
        _check_openai(path, headers)
        return self._openai(method, headers, raw, *found.groups())

    def take_from_a_stranger(self, dialect: str, path: str, bodies: list[dict[str, Any]]) -> str:
        """Take a batch that another program makes with the same account; return its id."""
        made = self._make(dialect, None, [(f"theirs-{place}", path, _json(body)) for place, body in enumerate(bodies)])
        assert isinstance(made, Made)
        return made.id

    def _openai(
        self, method: str, headers: Mapping[str, str], raw: bytes, kind: str, ident: str | None, act: str | None
    ) -> tuple[int, bytes]:
        match method, kind, ident, act:
            case "POST", "files", None, None:
                name = f"file-{len(self.files) + 1}"
                self.files[name] = _file_in(raw, headers["content-type"])
                return 200, _json({"id": name, "object": "file", "purpose": "batch"})
            case "GET", "files", str(name), "content":
                return 200, self._output(name)
            case "DELETE", "files", str(name), None:
                self.deleted.append(name)
                return 200, _json({"id": name, "object": "file", "deleted": True})
            case "POST", "batches", None, None:
                asked = json.loads(raw)
                if asked.keys() != {"input_file_id", "endpoint", "completion_window", "metadata"}:
                    raise Violation(f"Unknown parameters: {sorted(asked)}")
                lines = [json.loads(line) for line in self.files[asked["input_file_id"]].splitlines()]
                if any(one["url"] != asked["endpoint"] or one["method"] != "POST" for one in lines):
                    raise Violation("The URL of a line is not the batch's endpoint.")
                pairs = [(line["custom_id"], line["url"], _json(line["body"])) for line in lines]
                made = self._make("openai", asked["metadata"].get("tollgate"), pairs)
                if isinstance(made, Made):
                    made.input_file = asked["input_file_id"]
                return self._made(made, _openai_batch)
            case "GET", "batches", None, None:
                return 200, _json({"object": "list", "data": [_openai_batch(one) for one in self._of("openai")]})
            case "GET", "batches", str(name), None:
                return 200, _json(_openai_batch(self._look(name)))
            case "POST", "batches", str(name), "cancel":
                return 200, _json(_openai_batch(self._cancel(name)))
        raise Violation("Invalid URL", status=404)

    def _output(self, name: str) -> bytes:
        made = self._find(name.removeprefix("output-"))
        lines = []
        for number, (custom_id, status, body) in enumerate(made.results()):
            if status == 200:
                response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
                lines.append(
                    _json({"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": None})
                )
        return self._cut(b"\n".join(lines) + b"\n")

    def _anthropic(
        self, method: str, headers: Mapping[str, str], raw: bytes, ident: str | None, act: str | None
    ) -> tuple[int, bytes]:
        if headers.get("anthropic-version") != "2023-06-01" or not headers.get("x-api-key", "").startswith("sk-"):
            raise Violation("invalid x-api-key", code="authentication_error", status=401)
        match method, ident, act:
            case "POST", None, None:
                asked = json.loads(raw)["requests"]
                if bad := [one["custom_id"] for one in asked if not re.fullmatch(r"[\w-]{1,64}", one["custom_id"])]:
                    raise Violation(f"custom_id: {bad[0]} is none")
                pairs = [(one["custom_id"], "/v1/messages", _json(one["params"])) for one in asked]
                return self._made(self._make("anthropic", None, pairs), _anthropic_batch)
            case "GET", None, None:
                found = [_anthropic_batch(one) for one in self._of("anthropic")]
                return 200, _json({"data": found, "has_more": False})
            case "GET", str(name), None:
                return 200, _json(_anthropic_batch(self._look(name)))
            case "POST", str(name), "cancel":
                return 200, _json(_anthropic_batch(self._cancel(name)))
            case "DELETE", str(name), None:
                self.deleted.append(name)
                return 200, _json({"id": name, "type": "message_batch_deleted"})
            case "GET", str(name), "results":
                made = self._find(name)
                told = {one[0]: one for one in made.results()}
                lines = [
                    _json({"custom_id": custom_id, "result": _anthropic_result(status, body)})
                    for custom_id, status, body in made.results()
                ]
                left = "canceled" if made.cancelled else "expired"
                lines += [
                    _json({"custom_id": custom_id, "result": {"type": left}})
                    for place, (custom_id, _, _) in enumerate(made.lines)
                    if custom_id not in told and place not in made.fault.missing
                ]
                return 200, self._cut(b"\n".join(lines) + b"\n")
        raise Violation("Not found", status=404)

    def _gemini_make(self, model: str, raw: bytes) -> tuple[int, bytes]:
        batch = json.loads(raw)["batch"]
        asked = batch["inputConfig"]["requests"]["requests"]
        pairs = [(one["metadata"]["key"], f"gemini:{model}", _json(one["request"])) for one in asked]
        return self._made(self._make("gemini", batch["displayName"], pairs), _gemini_batch)

    def _gemini(self, method: str, ident: str | None, act: str | None) -> tuple[int, bytes]:
        match method, ident, act:
            case "GET", None, None:
                return 200, _json({"operations": [_gemini_batch(one) for one in self._of("gemini")]})
            case "GET", str(name), None:
                return 200, _json(_gemini_batch(self._look(name)))
            case "POST", str(name), "cancel":
                self._cancel(name)
                return 200, b"{}"
            case "DELETE", str(name), None:
                self.deleted.append(name)
                return 200, b"{}"
        raise Violation("Not found", status=404)

    def _make(self, dialect: str, name: str | None, pairs: list[tuple[str, str, bytes]]) -> Made | int:
        """Make a batch, or return the status that refuses it; both, where it is told so after it was made."""
        status = self.fault.refuse.pop(0) if self.fault.refuse else None
        if status is not None and not self.fault.after_taking:
            return status
        if len({custom_id for custom_id, _, _ in pairs}) < len(pairs):
            raise Violation("A custom_id was used twice.")
        lines = [(custom_id, *self._answer(path, raw, dialect)) for custom_id, path, raw in pairs]
        made = Made(f"{dialect}_{secrets.token_hex(8)}", dialect, name, lines, self._now(), self.fault)
        self.made.append(made)
        return made if status is None else status

    def _made(self, made: Made | int, told: Callable[[Made], dict[str, Any]]) -> tuple[int, bytes]:
        return (made, b'{"error":{"message":"scripted"}}') if isinstance(made, int) else (200, _json(told(made)))

    def _of(self, dialect: str) -> list[Made]:
        return [one for one in reversed(self.made) if one.dialect == dialect]

    def _find(self, ident: str) -> Made:
        found = next((one for one in self.made if one.id == ident), None)
        if found is None:
            raise Violation(f"No batch {ident}", status=404)
        return found

    def _look(self, ident: str) -> Made:
        made = self._find(ident)
        made.looks += 1
        return made

    def _cancel(self, ident: str) -> Made:
        made = self._find(ident)
        if made.state == "running":
            made.cancelled = True
        return made

    def _cut(self, body: bytes) -> bytes:
        if self.fault.cut_results:
            self.fault.cut_results -= 1
            raise ConnectionResetError(body[: len(body) // 2])
        return body


def _check_openai(path: str, headers: Mapping[str, str]) -> None:
    is_azure = path.startswith("/openai")
    if is_azure != ("api-version=" in path) or is_azure != ("api-key" in headers):
        raise Violation("Access denied", status=401)
    if not is_azure and not headers.get("authorization", "").startswith("Bearer sk-"):
        raise Violation("Incorrect API key provided.", code="invalid_api_key", status=401)


def _openai_batch(made: Made) -> dict[str, Any]:
    state = {"running": "in_progress"}.get(made.state, made.state)
    has_output = state in ("completed", "cancelled", "expired") and any(line[1] == 200 for line in made.results())
    errors = (
        {"object": "list", "data": [{"code": made.fault.code, "message": "scripted"}]} if state == "failed" else None
    )
    return {
        "id": made.id,
        "object": "batch",
        "status": state,
        "created_at": int(made.created_at),
        "metadata": {"tollgate": made.name},
        "input_file_id": made.input_file,
        "output_file_id": f"output-{made.id}" if has_output else None,
        "error_file_id": None,
        "errors": errors,
        "request_counts": {"total": len(made.lines), "completed": 0, "failed": 0},
    }


def _anthropic_batch(made: Made) -> dict[str, Any]:
    is_running = made.state == "running"
    counts = dict.fromkeys(("succeeded", "errored", "canceled", "expired"), 0)
    return {
        "id": made.id,
        "type": "message_batch",
        "processing_status": "in_progress" if is_running else "ended",
        "request_counts": {**counts, "processing" if is_running else "succeeded": len(made.lines)},
        "created_at": datetime.fromtimestamp(made.created_at, UTC).isoformat(),
        "results_url": None if is_running else f"/v1/messages/batches/{made.id}/results",
    }


def _anthropic_result(status: int, body: dict[str, Any]) -> dict[str, Any]:
    if status == 200:
        return {"type": "succeeded", "message": body}
    return {"type": "errored", "error": {"type": "error", "error": {"type": "api_error", "message": "scripted"}}}


def _gemini_batch(made: Made) -> dict[str, Any]:
    words = {"running": "RUNNING", "completed": "SUCCEEDED", "cancelled": "CANCELLED", "expired": "EXPIRED"}
    told: dict[str, Any] = {
        "name": f"batches/{made.id}",
        "metadata": {
            "displayName": made.name,
            "state": f"BATCH_STATE_{words.get(made.state, 'FAILED')}",
            "batchStats": {"requestCount": str(len(made.lines))},
        },
    }
    if made.state == "running":
        return told
    answers = []
    for custom_id, status, body in made.results():
        one: dict[str, Any] = {"response": body} if status == 200 else {"error": {"code": 13, "message": "scripted"}}
        answers.append(one if made.fault.unnamed else {**one, "metadata": {"key": custom_id}})
    return {**told, "done": True, "response": {"inlinedResponses": {"inlinedResponses": answers}}}


def _file_in(raw: bytes, kind: str) -> bytes:
    """Return the file of an upload, whose fields are as OpenAI wants them."""
    boundary = b"--" + kind.partition("boundary=")[2].encode()
    parts: dict[str, bytes] = {}
    for part in raw.split(boundary)[1:-1]:
        head, _, body = part.partition(b"\r\n\r\n")
        found = DISPOSITION.search(head)
        assert found is not None
        parts[found[1].decode()] = body.removesuffix(b"\r\n")
    if parts.get("purpose") != b"batch":
        raise Violation("'purpose' must be batch")
    return parts["file"]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
