# A browser on the engine's machine can reach it: what a page of another site has it send is refused.

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import CHAT, running_front

OURS = ["127.0.0.1", "127.0.0.1:8100", "localhost", "LOCALHOST:8100", "[::1]:8100", "127.8.9.1:1"]
FOREIGN = ["evil.example", "evil.example:8100", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.7:8100"]


@pytest.mark.parametrize("path", ["/health", "/load", "/v1/models", "/metrics"])
def test_a_name_that_is_made_to_lead_here_is_refused(http: httpx.Client, path: str) -> None:
    """Without a secret, a page whose name was bound to 127.0.0.1 could read all answers as its own site's."""
    ours = [http.get(path, headers={"host": host}).status_code for host in OURS]
    foreign = [http.get(path, headers={"host": host}) for host in FOREIGN]

    assert ours == [200] * len(OURS)
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in foreign} == {(403, "foreign_page")}


@pytest.mark.parametrize("path", ["/drain", "/v1/chat/completions"])
@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost.evil.example:8100", "null", ""])
def test_a_page_of_another_site_has_nothing_done(
    http: httpx.Client, engine: FakeEngine, path: str, origin: str
) -> None:
    """A browser sends such a request without asking before, since it is like that of a form."""
    answer = http.post(path, json=CHAT, headers={"origin": origin, "content-type": "text/plain"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_page")
    assert http.get("/load").json()["status"] == "active"


def test_a_page_of_this_machine_may_call(http: httpx.Client) -> None:
    """As programs on it may."""
    answer = http.post("/v1/chat/completions", json=CHAT, headers={"origin": "http://localhost:3000"})

    assert answer.status_code == 200


def test_an_engine_with_a_secret_has_whatever_name_it_was_given(folder: Path) -> None:
    """That of a container or of a proxy: no page has its secret, and none may use it either."""
    with running_front(folder, FakeEngine(speaking([5, 6])), api_key="s") as url, httpx.Client(base_url=url) as http:
        http.headers.update({"authorization": "Bearer s", "host": "engine:8100"})
        answer = http.get("/load")
        page = http.post("/drain", headers={"origin": "https://evil.example"})

    assert (answer.status_code, page.status_code) == (200, 403)
