# A client that leaves at a chosen moment, where one with little patience would leave at any.

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tests.support.house import House
from tests.support.waiting import until


def ask_and_leave(house: House, path: str, body: dict[str, Any], when: Callable[[], object], **headers: str) -> float:
    """Ask as the house's team and leave, nothing read, as soon as ``when()`` is true; return that monotonic moment."""
    where = urlsplit(house.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
    said = {"authorization": f"Bearer {house.team_key}", "content-type": "application/json"}
    connection.request("POST", path, json.dumps(body), said | headers)
    until(when)
    left = time.monotonic()
    connection.close()
    return left
