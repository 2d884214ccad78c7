# The page for people: served with a strict policy, made of nothing but text nodes, and fed by the public API alone.

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

import gateway.http.console
from billing.core.money import to_nano
from billing.ledger.ledger import insert_records
from gateway.core.clock import Clock
from gateway.storage.database import Database
from gateway.storage.tables import teams
from tests.support.factories import make_record
from tests.support.house import House, running_house, settings_for
from tests.support.paying_team import PayingTeam
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey

FOLDER = Path(gateway.http.console.__file__).parent
IN_NODE = Path(__file__).parents[1] / "support" / "console_in_node.mjs"
MANY = [f"many_{number:03}" for number in range(250)]  # teams
PARTS = sorted(gateway.http.console.MEDIA_TYPES)


def get(house: House, path: str) -> httpx.Response:
    return httpx.get(house.url + path, timeout=10)


def in_node(house: House, key: str, act: str, *more: str) -> dict[str, Any]:
    """Run the console's modules as a browser would, and return what its reader sees."""
    if (node := shutil.which("node")) is None:
        pytest.skip("SKIPPED: Node is not installed; the console's JavaScript was not run")
    command = [node, str(IN_NODE), str(FOLDER), house.url, key, act, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_page_is_open_and_its_policy_is_strict(house: House) -> None:
    """Anybody may load the page; it runs our own files alone, talks to us alone, and stands in nobody's frame."""
    page = get(house, "/console")

    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert page.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_served_and_stands_alone(house: House, name: str) -> None:
    """Each file comes with its own type and the policy, and none names another host."""
    part = get(house, f"/console/{name}")

    assert part.content == (FOLDER / name).read_bytes()
    assert part.headers["content-type"].startswith(gateway.http.console.MEDIA_TYPES[name])
    assert "content-security-policy" in part.headers
    assert set(re.findall(r"https?://[^/'\"]+", part.text)) <= {"http://www.w3.org"}  # the namespace of SVG


@pytest.mark.parametrize("name", ["none.js", "__init__.py", "..%2f__init__.py", "%2e%2e%2fsettings.py", "%00"])
def test_nothing_else_is_served(house: House, name: str) -> None:
    """Only the page's own parts can be asked for."""
    assert get(house, f"/console/{name}").status_code == 404


def test_every_part_is_asked_for() -> None:
    """What the page loads is served, and what is served is loaded."""
    asked = {"index.html", *re.findall(r"/console/([\w.]+)", (FOLDER / "index.html").read_text())}
    for name in PARTS:
        asked |= set(re.findall(r'from "\./([\w.]+)"', (FOLDER / name).read_text()))

    assert asked == set(PARTS)
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js")} == set(PARTS)


def test_text_never_becomes_markup() -> None:
    """No file has a way to turn text into elements or code, and the page has neither inline scripts nor styles."""
    ways = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc")
    page = (FOLDER / "index.html").read_text()

    assert {name: ways.findall(text) for name in PARTS if ways.search(text := (FOLDER / name).read_text())} == {}
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", page)


def test_admin_sees_the_house(house: House) -> None:
    """Teams, keys, models, health and cost, with a hostile name shown as the text that it is."""
    name = "<script>alert(1)</script>"
    team_id = f"team-{uuid.uuid4().hex[:12]}"
    with house.client(house.admin_key) as admin:
        admin.post("/admin/teams", json={"id": team_id, "name": name, "limits": {"usd_per_day": 7}}).raise_for_status()

    seen = in_node(house, house.admin_key, "admin")

    assert seen["faults"] == []
    assert name in seen["text"]
    assert seen["tags"] == 0
    for words in (team_id, "$7.00", "postgres: ok", "redis: ok", "small", "Revoke"):
        assert words in seen["text"]


def test_team_sees_itself(house: House) -> None:
    """Its own usage, and what is left of its limits."""
    team_id = f"team-{uuid.uuid4().hex[:12]}"
    with house.client(house.admin_key) as admin:
        limits = {"usd_per_day": 7, "requests_per_minute": 60}
        admin.post("/admin/teams", json={"id": team_id, "limits": limits}).raise_for_status()
        key = admin.post("/admin/keys", json={"team_id": team_id}).raise_for_status().json()["key"]

    seen = in_node(house, key, "team")

    assert seen["faults"] == []
    assert "$7.00 of $7.00" in seen["text"]
    assert "Requests a minute at most 60" in seen["text"]  # what is left of it, only an answer says


def test_team_sees_what_was_corrected(house: House) -> None:
    """Booked corrections stand beside the cost, and what is left of the limits follows them."""
    team = PayingTeam(house, usd_per_day=7)
    team.correct(cost_usd="2").raise_for_status()
    team.correct(cost_usd="-3.5").raise_for_status()

    seen = in_node(house, team.key, "team")

    assert seen["faults"] == []
    assert "and -$1.50 of corrections" in seen["text"]
    assert "$8.50 of $7.00" in seen["text"]


def test_chat_box_streams_an_answer(house: House) -> None:
    """What the model streams stands in the conversation, with what it cost."""
    body = {"model": "small", "messages": [{"role": "user", "content": "hello console"}]}
    with house.client() as client:
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]

    seen = in_node(house, house.team_key, "chat", "small", "hello console")

    assert seen["faults"] == []
    assert re.sub(r"\s+", "", whole) in re.sub(r"\s+", "", seen["text"])
    assert re.search(r"small: \d+ tokens, \$0\.\d+", seen["text"])


def test_a_failed_answer_and_its_prompt_stay_until_they_are_dismissed(house: House) -> None:
    """The error stands below its prompt, also after the figures were read again; the prompt can be sent again."""
    seen = in_node(house, house.team_key, "chat", "nonsense", "hello console")

    assert seen["faults"] == []
    assert re.search(
        r"hello console .*The model 'nonsense' does not exist.* Request [0-9a-f-]{36} Dismiss", seen["before"]
    )
    assert seen["prompt"] == "hello console"
    assert "nonsense" not in seen["text"] and "hello console" not in seen["text"]  # dismissed


def test_what_is_left_is_what_refusals_say(house: House) -> None:
    """After a refusal nothing is left of the minute, and what no header has told is not taken for all of it."""
    team = PayingTeam(house, requests_per_minute=1, concurrent_requests=5)
    team.ask()

    seen = in_node(house, team.key, "chat", "small", "hello")

    assert "Requests a minute 0 of 1" in seen["before"]
    assert "Requests at once at most 5" in seen["before"]
    assert "limit of 1 request per minute" in seen["before"]


def test_a_notice_stays_until_it_is_dismissed_or_its_cause_is_gone(house: House) -> None:
    """A wrong key is told; the reader may dismiss that, and the right key takes it away."""
    seen = in_node(house, house.team_key, "page", "tg-wrong")

    told = "This key is not known, or no longer."
    assert seen["notices"] == [told, None, told, None]
    assert "Cost this month" in seen["text"]


@pytest.fixture
def large_house(upstream: ScriptedUpstream, tmp_path: Path, postgres_url: str) -> Iterator[House]:
    """A house of its own, with more teams than two pages hold, each of which owes a dollar today."""
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        with running_house(settings_for(database_url, valkey.url, upstream.url, tmp_path)) as house:
            asyncio.run(book_of_many_teams(database_url))
            yield house


async def book_of_many_teams(database_url: str) -> None:
    """Make many teams, and book a call of each."""
    clock, database = Clock(), Database(database_url, pool_size=1)
    records = [make_record(clock.new_id(), team_id=name, cost_nanousd=to_nano(1)) for name in MANY]
    try:
        async with database.begin() as connection:
            await connection.execute(insert(teams), [{"id": name, "name": name} for name in MANY])
            await insert_records(connection, records, today=clock.today())
    finally:
        await database.close()


def test_admin_sees_sums_of_all_teams_and_every_team_page_by_page(large_house: House) -> None:
    """However many teams there are, the page asks four times; its sums are of all of them, on every page."""
    seen = in_node(large_house, large_house.admin_key, "teams")

    asked = [path.partition("?")[0] for path in seen["asked"]]
    listed = [page.partition("Usage on")[2].partition("Cost by team and model")[0] for page in seen["pages"]]
    assert sorted(asked) == ["/admin/keys", "/admin/usage", "/health/ready", "/v1/models"]
    assert [name for page in listed for name in re.findall(r"\b(many_\d{3}) active", page)] == MANY
    assert len(listed) == 3
    for page in seen["pages"]:
        assert "Cost today $250.00" in page and "Requests today 250" in page
        assert "230 others" in page


def test_page_works_in_a_browser(house: House) -> None:
    """In Chromium, under its policy and at a phone's width: sign in, see usage, chat, sign out."""
    api = pytest.importorskip("playwright.sync_api", reason="SKIPPED: playwright is not installed; no browser was run")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("SKIPPED: Chromium is not installed; no browser was run")
    said: list[str] = []
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    with (
        api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=quiet) as browser,
    ):
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if "Content Security" in message.text else None)
        page.goto(f"{house.url}/console")
        page.get_by_label("Key").fill(house.team_key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_label("Message").fill("hello")
        page.get_by_role("button", name="Send").click()
        page.get_by_text(re.compile(r"small: \d+ tokens")).wait_for()
        width = page.evaluate("document.documentElement.scrollWidth")
        refusal = {"status": 503, "json": {"error": {"message": "no room"}}}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**refusal))
        page.get_by_label("Message").fill("hello again")
        page.get_by_role("button", name="Send").click()
        page.get_by_text("no room").wait_for()
        page.wait_for_timeout(3000)  # the figures are read again meanwhile
        kept = page.get_by_text("no room").is_visible(), page.get_by_label("Message").input_value()
        page.get_by_role("button", name="Dismiss").click()
        is_left = page.get_by_text("no room").count()
        page.reload()
        page.get_by_text("Cost this month").wait_for()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("Key").fill(house.admin_key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_text("Cost by team and model").wait_for()
        admins_width = page.evaluate("document.documentElement.scrollWidth")
        browser.close()

    assert said == []
    assert (width, admins_width) == (390, 390)
    assert (kept, is_left) == ((True, "hello again"), 0)
