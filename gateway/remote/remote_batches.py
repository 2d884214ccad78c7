# A team's batches over HTTP: what `tollgate batch` asks where it is given a URL. local_batches.py answers the same on a
# deployment's own machine.

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gateway.terminal.remote_gateway import GatewayFault, RemoteGateway

View = dict[str, Any]
PIECE = 1 << 20  # bytes


class RemoteBatches:
    """The batches that a key may see. Its methods raise GatewayFault."""

    def __init__(self, gateway: RemoteGateway) -> None:
        self._gateway = gateway

    def submit(self, file: Path, team: str | None, endpoint: str, priority: str, callback_url: str | None) -> View:
        """Send a file's requests and make a batch of them; ``team`` can only be the key's own."""
        if team is not None and team != (own := self._gateway.get("/v1/team")["id"]):
            raise GatewayFault(f"a key submits batches of its own team alone, {own}: leave --team out")
        boundary = secrets.token_hex(16)
        name = file.name.encode("ascii", "replace").decode().replace('"', "_")
        head = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
            f'content-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        length = len(head) + file.stat().st_size + len(tail)
        body, kind = _pieces(head, file, tail), f"multipart/form-data; boundary={boundary}"
        sent = self._gateway.send("/v1/files", body, length, kind)
        new = {"input_file_id": sent["id"], "endpoint": endpoint, "completion_window": "24h", "priority": priority}
        new |= {} if callback_url is None else {"callback_url": callback_url}
        return self.show(self._gateway.post("/v1/batches", new)["id"])

    def show(self, batch_id: str) -> View:
        """Return a batch."""
        view: View = self._gateway.get(self._path(batch_id))
        return view

    def list(self, team: str | None, status: str | None, limit: int) -> list[View]:
        """Return batches, newest first: of all teams with an admin key, else of the key's own."""
        if self._gateway.address.admin_key is not None:
            found: list[View] = self._gateway.get("/admin/batches", team_id=team, status=status, limit=limit)["data"]
            return found
        own = self._gateway.get("/v1/team")["id"]
        if team not in (None, own):
            raise GatewayFault(f"a team's key sees its own team's batches alone, {own}'s")
        page = self._gateway.get("/v1/batch", limit=limit)["data"]
        return [{"team_id": own, **view} for view in page if status in (None, view["status"])]

    def cancel(self, batch_id: str) -> View:
        """Start nothing more of a batch."""
        view: View = self._gateway.post(f"{self._path(batch_id)}/cancel")
        return view

    def _path(self, batch_id: str) -> str:
        """Return where a batch is: any team's with an admin key alone, else one of the key's own."""
        return f"{'/admin/batches' if self._gateway.address.team_key is None else '/v1/batch'}/{batch_id}"

    def results(self, batch_id: str, failed: bool) -> Generator[bytes, None, None]:
        """Yield what came out so far, some JSON Lines at a time; ``failed``: only what failed or expired."""
        pages = self._gateway.content(f"/v1/batch/{batch_id}/results")
        yield from filter(_has_failed, _lines(pages)) if failed else pages


def _lines(pages: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for page in pages:
        *whole, rest = (rest + page).split(b"\n")
        yield from (line + b"\n" for line in whole)


def _has_failed(line: bytes) -> bool:
    answered = msgspec.json.decode(line)["response"]
    return answered is None or answered["status_code"] >= 400


def _pieces(head: bytes, file: Path, tail: bytes) -> Iterator[bytes]:
    yield head
    with file.open("rb") as contents:
        while piece := contents.read(PIECE):
            yield piece
    yield tail
