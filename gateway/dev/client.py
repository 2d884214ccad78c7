# How `tollgate dev` calls its own stack over HTTP, with the standard library: readiness, and a key for the demo team.

from __future__ import annotations

import http.client
import json
from typing import Any

from gateway.run.processes import LOOPBACK
from gateway.run.supervisor import StartFailed

DEMO_TEAM = "team_demo"


class StackClient:
    """One loopback server, asked one thing at a time."""

    def __init__(self, port: int) -> None:
        self._port = port

    def succeeds(self, path: str, key: str | None = None) -> bool:
        """Return whether a GET is answered with 200."""
        try:
            return self._ask("GET", path, key, timeout=2.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def is_drained(self, secret: str) -> bool:
        """Return whether the engine takes nothing any more and has finished what it took."""
        try:
            status, load = self._ask("GET", "/load", secret, timeout=1.0)
        except (OSError, http.client.HTTPException):
            return False
        return status == 200 and load["status"] == "draining" and load["running"] == load["queue_depth"] == 0

    def models(self, team_key: str) -> list[str]:
        """Return the names a client may ask for, in the catalogue's order."""
        status, answer = self._ask("GET", "/v1/models", team_key)
        if status != 200:
            raise StartFailed(f"the gateway does not list its models: {answer}")
        return [model["id"] for model in answer["data"]]

    def make_demo_key(self, admin_key: str) -> str:
        """Return a fresh key of the demo team, which is made if there is none."""
        if self._ask("GET", f"/admin/teams/{DEMO_TEAM}", admin_key)[0] == 404:
            self._make("/admin/teams", admin_key, {"id": DEMO_TEAM, "name": "Demo"})
        return str(self._make("/admin/keys", admin_key, {"team_id": DEMO_TEAM, "name": "tollgate dev"})["key"])

    def _make(self, path: str, admin_key: str, thing: dict[str, str]) -> Any:
        status, answer = self._ask("POST", path, admin_key, thing)
        if status not in (200, 201):
            raise StartFailed(f"POST {path} answered {status}: {answer}")
        return answer

    def _ask(self, method: str, path: str, key: str | None, body: Any = None, timeout: float = 10.0) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=timeout)
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(content)
        except ValueError:
            return answer.status, content.decode(errors="replace")
