# The page for people: its files, served with a strict policy, and what a reader sees and does in a browser.

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from redis import Redis
from sqlalchemy import insert

import gateway.http.console
from billing.core.money import to_nano
from billing.core.records import Attempt, Status
from billing.ledger.instance_samples import SECOND, Look, book_look
from billing.ledger.ledger import insert_records
from gateway.core.clock import Clock
from gateway.core.settings import Fleet, Pool, ProviderSettings
from gateway.fleet.rollouts import Rolling, rollout_key
from gateway.storage.database import Database
from gateway.storage.tables import teams
from gateway.webhooks.budget_alerts import BudgetAlerts
from tests.support.browser import READY, Browser, Page, browser
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.house import House, running_house, settings_for
from tests.support.paying_team import PayingTeam
from tests.support.scripted_mcp import ScriptedMcp
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.waiting import until

FOLDER = Path(gateway.http.console.__file__).parent
FILES = sorted(gateway.http.console.FILES)
OURS = [name for name in FILES if not name.startswith("vendor/")]
VIEWS = sorted(gateway.http.console.VIEWS)
FOR_ADMINS = {"teams", "fleet", "finance", "audit"}
MANY = [f"many_{number:04}" for number in range(1000)]  # teams
ROLLING = Rolling(state="standing", revision="0a1b", kept="0c2d", share=0.1, since=0.0, due_at=None)
MARKUP = "<script>window.broken=1</script><img src=x onerror=window.broken=1>"


# ---- the files


def get(house: House, path: str) -> httpx.Response:
    return httpx.get(house.url + path, timeout=10)


@pytest.mark.parametrize("path", ["/console", "/console/overview", "/console/calls"])
def test_page_is_open_and_its_policy_is_strict(house: House, path: str) -> None:
    """Anybody may load the page; it runs our own files alone, talks to us alone, and stands in nobody's frame."""
    page = get(house, path)

    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert page.headers["x-content-type-options"] == "nosniff"


def test_every_part_is_served_and_stands_alone(house: House) -> None:
    """Each file comes with its own type and the policy, and none of ours names another host."""
    for name in FILES:
        part = get(house, f"/console/{name}")

        assert part.content == (FOLDER / name).read_bytes()
        assert part.headers["content-type"].startswith(gateway.http.console.FILES[name])
        assert "content-security-policy" in part.headers
        if name in OURS:  # the namespace of SVG
            assert set(re.findall(r"https?://[^/'\"]+", part.text)) <= {"http://www.w3.org"}


def test_a_part_that_the_browser_has_is_not_sent_again(house: House) -> None:
    """By its tag, which changes with its content."""
    first = get(house, "/console/ui.js")
    headers = {"if-none-match": first.headers["etag"]}
    again = httpx.get(f"{house.url}/console/ui.js", headers=headers)
    other = httpx.get(f"{house.url}/console/api.js", headers=headers)

    assert (again.status_code, again.content) == (304, b"")
    assert "content-security-policy" in again.headers
    assert other.status_code == 200


def test_nothing_else_is_served(house: House) -> None:
    """Only the page's own parts can be asked for."""
    others = ("none.js", "__init__.py", "..%2f__init__.py", "%2e%2e%2fsettings.py", "%00", "vendor", "vendor/README.md")
    for name in (*others, "views/none.js", "vendor/..%2f__init__.py"):
        assert get(house, f"/console/{name}").status_code == 404, name


def test_every_part_is_asked_for() -> None:
    """What the page loads is served, and what is served is loaded."""
    asked = {"index.html", *re.findall(r"/console/([\w./]+)", (FOLDER / "index.html").read_text())}
    for name in OURS:
        text = (FOLDER / name).read_text()
        asked |= {(Path(name).parent / said).as_posix() for said in re.findall(r'from "\./([\w./]+)"', text)}
        asked |= set(re.findall(r'from "\.\./([\w./]+)"', text))
        asked |= set(re.findall(r'import\("\.\./([\w./]+)"', text))
        asked |= set(re.findall(r'"/console/(vendor/[\w.]+)"', text))
    listed = re.search(r"const VIEWS = \{(.*?)\};", (FOLDER / "app.js").read_text(), re.DOTALL)
    assert listed is not None
    asked |= {f"views/{name}.js" for name in re.findall(r"^  (\w+): \[", listed[1], re.MULTILINE)}

    assert asked == set(FILES)


def test_libraries_are_what_their_makers_published() -> None:
    """Each is the file whose digest its table tells, and its licence lies beside it."""
    told = dict(re.findall(r"^\| `([\w.]+)` .*`(\w{64})` \|$", (FOLDER / "vendor/README.md").read_text(), re.MULTILINE))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (FOLDER / "vendor").glob("*.js")}

    assert told == found
    assert len(list((FOLDER / "vendor").glob("LICENSE-*.md"))) == 3


def test_text_never_becomes_markup() -> None:
    """No file has a way to turn text into elements or code, and the page has neither inline scripts nor styles."""
    ways = re.compile(
        r"inner\W?HTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc", re.I
    )
    page = (FOLDER / "index.html").read_text()

    assert {name: ways.findall(text) for name in OURS if ways.search(text := (FOLDER / name).read_text())} == {}
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", page)


# ---- in a browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all of these."""
    with browser() as running:
        yield running


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page whose policy forbids nothing that it does."""
    page = chromium.page()
    yield page
    page.close()
    assert page.faults == []


def enter(page: Page, house: House, key: str, view: str = "overview", **query: str) -> None:
    """Sign in at the address of a view."""
    page.open(f"{house.url}/console/{view}?{urlencode(query)}")
    page.fill("#key", key)
    page.press("Enter")
    page.wait_text("Sign out")


def new_team(house: House, **team: Any) -> tuple[str, str]:
    """Return the id of a new team, and a key of it."""
    team_id = f"team-{uuid.uuid4().hex[:12]}"
    with house.client(house.admin_key) as admin:
        admin.post("/admin/teams", json={"id": team_id} | team).raise_for_status()
        return team_id, admin.post("/admin/keys", json={"team_id": team_id}).raise_for_status().json()["key"]


def asked_of_api(page: Page) -> list[str]:
    """Return the paths of the API that were asked for."""
    paths = [urlsplit(url).path for url in page.asked]
    return [path for path in paths if not path.startswith("/console")]


def test_admin_sees_the_house(house: House, page: Page) -> None:
    """Health, models, teams and keys, with a hostile name shown as the text that it is."""
    team_id, _ = new_team(house, name=MARKUP, limits={"usd_per_day": 7})

    enter(page, house, house.admin_key)
    page.wait_text("postgres: ok, redis: ok")
    page.click("Models")
    page.wait_text("small at upstream, local")
    page.click("Teams and keys")
    page.fill("[aria-label^='Search teams']", team_id)
    page.press("Enter")
    page.wait("document.querySelectorAll('tbody tr').length === 1")
    page.click(team_id)
    page.wait_text("Revoke")
    listed = page.text()
    page.click("Its budgets")
    page.wait_text("$7.00 left of $7.00")

    assert team_id in listed and MARKUP in listed
    assert page.look("window.broken") is None
    assert page.look("document.querySelectorAll('main script, dialog script, main img, dialog img').length") == 0


def test_what_callers_name_is_text(house: House, page: Page) -> None:
    """Users, metadata, models and tags of callers show as they were sent, in the list and in the call."""
    team = PayingTeam(house)
    team.ask(user=MARKUP, metadata={"tag": MARKUP})
    team.settled()

    enter(page, house, team.key, "calls", user=MARKUP)
    page.wait("Boolean(document.querySelector('tbody a'))")
    page.look("document.querySelector('tbody a').click()")
    page.wait_text("Waterfall")

    assert page.text().count(MARKUP) >= 3  # the chip, the user, the tag
    assert page.look("window.broken") is None


def test_a_call_that_reached_no_upstream_says_so(house: House, page: Page) -> None:
    """In the place of its waterfall, with the models that were left out and why; attempts side by side say so, too."""
    team = PayingTeam(house)
    unasked = team.book(status=Status.FAILED, total_ms=31.0, left_out={"large": ("breaker_open",)})
    slow = Attempt("up/a/http://a/v1/small", "hedge_lost", 900.0)
    beside = Attempt("up/b/http://b/v1/small", "ok", 200.0, hedge=True)
    hedged = team.book(attempts=(slow, beside), first_token_ms=900.0, total_ms=1000.0)

    enter(page, house, team.key, "calls", call=unasked)
    page.wait_text("Waterfall No upstream was asked: the call ended in the gateway, and costs nothing.")
    left = page.text()
    page.open(f"{house.url}/console/calls?call={hedged}")
    page.wait_text("up/b small: asked beside the first")
    bars = page.look("[...document.querySelectorAll('.waterfall .span')].map((each) => Number(each.getAttribute('x')))")

    assert "Left out of its route Model Why large breaker open" in left
    assert "up/a small: the other was sooner 900 ms" in page.text()
    assert bars == [0, 70, 90]


def test_a_call_is_found_by_keys_alone_after_few_requests(house: House, page: Page) -> None:
    """From the sign-in to one's call without a pointer; at most eight requests until the first figures show."""
    team = PayingTeam(house)
    with house.client(team.key) as client:
        body = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
        request_id = client.post("/v1/chat/completions", json=body).headers["x-request-id"]
        until(lambda: client.get(f"/v1/calls/{request_id}").status_code == 200)
    page.open(f"{house.url}/console")

    page.wait("document.activeElement.id === 'key'")
    page.type(team.key)
    page.press("Enter")
    page.wait_text("Requests 1")
    first = [urlsplit(url).path for url in page.asked]
    page.wait("document.activeElement === document.body")
    for _ in range(3):  # the skip link comes first
        page.press("Tab")
        if page.look("document.activeElement.type") == "search":
            break
    page.type(request_id)
    page.press("Enter")
    page.wait_text("Waterfall")
    text = page.text()
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")

    assert first.index("/v1/series") < 8
    assert request_id in text and "Held before" in text and "Charged" in text


def test_a_view_is_a_url_that_can_be_sent(house: House, page: Page) -> None:
    """Filters and period are in the address, the key is not; going back shows what was there before."""
    enter(page, house, house.team_key, "calls", period="7d")

    page.click("refused")
    page.wait("location.search.includes('status=refused')")
    there = page.look("location.pathname + location.search")
    page.look("history.back()")
    page.wait("document.querySelector('.chip[aria-pressed=true]') === null")

    assert there == "/console/calls?period=7d&status=refused"


def test_team_sees_what_is_left_of_its_limits(house: House, page: Page) -> None:
    """Its own usage, and what is left of its budgets."""
    _, key = new_team(house, limits={"usd_per_day": 7, "requests_per_minute": 60})

    enter(page, house, key, "budgets")
    page.wait_text("$7.00 left of $7.00")

    assert "Month ends at $0.00 at the rate so far" in page.text()
    assert "Requests a minute at most 60" in page.text()  # what is left of it, only an answer says
    assert "Teams and keys" not in page.text()


def test_limits_that_are_nearly_used_are_told(house: House, page: Page) -> None:
    """A day's, too: in the overview, to the team and to admins, and in the team's row of the budgets."""
    team = PayingTeam(house, usd_per_day=7, usd_per_month=7000)
    team.correct(cost_usd="6.30").raise_for_status()

    async def look() -> None:
        database = Database(house.settings.database_url, pool_size=1)
        await BudgetAlerts(database, Clock()).look()
        await database.close()

    asyncio.run(look())
    enter(page, house, team.key)
    page.wait_text("80 % of $7.00 a day are used")
    page.click("Sign out")
    enter(page, house, house.admin_key, "overview", team=team.id)
    page.wait_text(f"{team.id}: 80 % of $7.00 a day are used")
    page.open(f"{house.url}/console/budgets?after={team.id[:-1]}")
    page.wait_text(f"{team.id} {team.id} $6.30 90 % today")
    page.wait_text("near or past a limit now")


def test_team_sees_what_was_corrected(house: House, page: Page) -> None:
    """Booked corrections stand beside the cost, and what is left of the limits follows them."""
    team = PayingTeam(house, usd_per_day=7)
    team.correct(cost_usd="2").raise_for_status()
    team.correct(cost_usd="-3.5").raise_for_status()
    yesterday = (datetime.now(UTC).date() - timedelta(days=1)).isoformat()
    team.correct(cost_usd="-0.05", date=yesterday).raise_for_status()

    enter(page, house, team.key)
    page.wait_text("−$1.50 of it corrections")
    page.wait_text("$1.50 – Requests")  # no share or multiple of a refund
    page.click("Budgets")
    page.wait_text("$8.50 left of $7.00")


def test_playground_streams_an_answer_of_each_model(house: House, page: Page) -> None:
    """What the models stream stands side by side, with what it cost."""
    body = {"model": "small", "messages": [{"role": "user", "content": "hello console"}]}
    with house.client() as client:
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]

    enter(page, house, house.team_key, "playground", models="small,large")
    page.fill("#prompt", "hello console")
    page.press("Enter")
    page.wait("document.body.innerText.match(/tokens\\/s/g)?.length === 2")

    assert page.text().count(" ".join(whole.split())) == 2
    assert len(re.findall(r"(small|large): \d+ tokens, \$0\.\d+", page.text())) == 2
    assert page.look("document.getElementById('prompt').value") == ""


def test_a_failed_answer_and_its_prompt_stay_until_they_are_dismissed(house: House, page: Page) -> None:
    """The error stands below its prompt; the prompt can be sent again. Other models' answers are not touched."""
    enter(page, house, house.team_key, "playground", models="small,nonsense")
    page.fill("#prompt", "hello console")
    page.press("Enter")
    page.wait_text("tokens/s")
    page.wait_text("Dismiss")
    before, kept = page.text(), page.look("document.getElementById('prompt').value")
    page.click("Dismiss")
    page.wait("!document.querySelector('.problem')")

    assert re.search(r"hello console .*The model 'nonsense' does not exist.* Request [0-9a-f-]{36} Dismiss", before)
    assert kept == "hello console"
    assert page.text().count("hello console") == 1  # that of the model that answered


def test_what_is_left_is_what_refusals_say(house: House, page: Page) -> None:
    """After a refusal nothing is left of the minute, and what no header has told is not taken for all of it."""
    team = PayingTeam(house, requests_per_minute=1, concurrent_requests=5)
    team.ask()

    enter(page, house, team.key, "playground", models="small")
    page.fill("#prompt", "hello")
    page.press("Enter")
    page.wait_text("limit of 1 request per minute")
    page.wait_text("0 of 1 requests")
    page.click("Budgets")
    page.wait_text("Requests a minute 0 of 1 left")

    assert "Requests at once at most 5" in page.text()


def test_the_chart_tells_what_is_under_the_pointer(house: House, page: Page) -> None:
    """The hour, and each line's cost in it, in room that is kept for it."""
    team = PayingTeam(house)
    team.ask()
    team.settled()
    middle = "(r => [r.x + r.width * Math.min(new Date().getUTCHours() + 0.2, 22.9) / 23, r.y + r.height / 2])"
    height = "document.querySelector('.legend').getBoundingClientRect().height"

    enter(page, house, team.key)
    page.wait("Boolean(document.querySelector('.u-over'))")
    before = page.look(height)
    x, y = page.look(f"{middle}(document.querySelector('.u-over').getBoundingClientRect())")
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.wait("document.querySelector('.legend').innerText.includes(':00 UTC')")

    assert re.search(r"small \$0\.0000\d\d", page.text())
    assert page.look(height) == before


def test_a_wrong_key_is_told_until_the_right_one_comes(house: House, page: Page) -> None:
    """A wrong key is told beside its field; the right key takes that away."""
    told = "This key is not known, or no longer."
    page.open(f"{house.url}/console")
    page.fill("#key", "tg-wrong")
    page.press("Enter")
    page.wait_text(told)
    kept = page.look("document.getElementById('key').value")
    page.fill("#key", house.team_key)
    page.press("Enter")
    page.wait_text("First token, p95")

    assert told not in page.text()
    assert kept == "tg-wrong"  # to be mended


def test_routing_tells_the_score_and_who_is_asked(house: House, page: Page) -> None:
    """A prompt's way: the model, the sentence, the targets in their order, and who was left out."""
    enter(page, house, house.team_key, "routing", model="auto")
    page.fill("#prompt", "What is two and two?")
    page.click("Explain")
    page.wait_text("Left out")

    assert "Chance that a small model suffices: 0." in page.text()
    assert re.search(r"Targets, in their order .*(small|large) upstream, local active", page.text())


def test_thresholds_tell_what_they_cost_and_bring(house: House, page: Page) -> None:
    """The shipped card's curve at the route's prices, with the threshold in force; then what is pointed at."""
    enter(page, house, house.team_key, "routing", model="auto")
    page.wait("Boolean(document.querySelector('.u-over'))")
    in_force = page.text()
    page.look("document.querySelector('.u-over').scrollIntoView()")
    end = "(r => [r.x + r.width - 1, r.y + r.height / 2])(document.querySelector('.u-over').getBoundingClientRect())"
    x, y = page.look(end)
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.wait_text("Threshold 1: 0.0 % of calls to small models, $0.015000 a call, 62 % right")
    page.open(f"{house.url}/console/routing?model=small")
    page.wait_text("Explain")

    assert "Threshold 0.5: 97 % of calls to small models, $0.002433 a call, 39 % right; in force" in in_force
    assert "From the shipped model’s card (another pair never fitted: small alone 37 % right" in in_force
    assert "What a threshold costs" not in page.text()  # of a model there is none


def test_a_curve_is_drawn_where_a_large_model_is_the_cheaper_one(house: House, page: Page) -> None:
    """Its dollars fall from threshold to threshold: what is pointed at is told all the same."""
    draw = """Promise.all([import("/console/chart.js"), import("/console/ui.js")]).then(([{ Curve }, ui]) => {
      const points = [3, 1, 2].map((x) => ({ x, y: x / 4, words: `at ${x}` }));
      const [axis, html] = [{ name: "numbers", ticks: (at) => at.map(String) }, ui.html];
      const told = { label: "all", points, mark: points[1], across: axis, up: axis };
      const room = document.createElement("div");
      document.body.replaceChildren(room);
      ui.render(html`<div class="chart"><${Curve} ...${told} /></div>`, room);
    })"""
    page.open(f"{house.url}/console")
    page.look(draw)
    page.wait("Boolean(document.querySelector('.u-over'))")
    box = "document.querySelector('.u-over').getBoundingClientRect()"
    edges = f"(r => [r.x + 1, r.x + r.width - 1, r.y + r.height / 2])({box})"
    left, right, y = page.look(edges)
    for x, words in ((right, "at 3"), (left, "at 1"), ((left + right) / 2, "at 2")):
        page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        page.wait_text(words)


def test_a_new_key_is_kept_until_it_is_copied(house: House, page: Page) -> None:
    """Made, it stays after a refresh, with a snippet that is ready; then it is gone from the tab. It ends with its
    team, once that one's id is typed."""
    team_id, _ = new_team(house)
    enter(page, house, house.admin_key, "teams", team=team_id)
    page.wait_text("Where the new key is used")
    page.click("New key")
    page.wait_text("It is shown this once")
    page.open(page.look("location.href"))
    page.wait_text("It is shown this once")
    made = re.findall(r"export TOLLGATE_KEY=(tg-\S+)", page.text())
    with house.client(made[0]) as client:
        works = client.get("/v1/models").status_code
    page.click("I have copied it", "dialog button")
    page.wait("!document.body.innerText.includes('It is shown this once')")
    kept = page.look("sessionStorage.getItem('tollgate-new-keys')")
    page.look("globalThis.prompt = () => 'another'")
    page.click("Delete", "dialog button")
    page.wait_text(f"confirm={team_id}")
    page.look(f"globalThis.prompt = () => {json.dumps(team_id)}")
    page.click("Delete", "dialog button")
    page.wait("!document.querySelector('dialog[open]')")
    with house.client(made[0]) as client:
        ended = client.get("/v1/models").status_code

    assert (works, ended, kept) == (200, 401, "[]")


def test_a_team_is_suspended_and_resumed_and_a_key_rotated(house: House, page: Page) -> None:
    """By buttons: its calls are refused until it is resumed, and the new key works beside the old one's overlap."""
    team_id, key = new_team(house)
    enter(page, house, house.admin_key, "teams", team=team_id)
    page.look("globalThis.confirm = () => true")
    found, asked = {}, {"model": "small", "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 8}
    with house.client(key) as client:
        for button, then in (("Suspend", "Resume"), ("Resume", "Suspend")):
            page.click(button, "dialog button")
            page.wait_text(then)
            found[button] = client.post("/v1/chat/completions", json=asked).status_code
    page.wait("Boolean(document.querySelector('dialog [aria-label^=\"Rotate \"]'))")
    page.look("document.querySelector('dialog [aria-label^=\"Rotate \"]').click()")
    page.wait_text("It is shown this once")
    made = re.findall(r"export TOLLGATE_KEY=(tg-\S+)", page.text())[0]
    for name, each in (("Rotate", made), ("overlap", key)):
        with house.client(each) as client:
            found[name] = client.post("/v1/chat/completions", json=asked).status_code

    assert made != key and found == {"Suspend": 403, "Resume": 200, "Rotate": 200, "overlap": 200}


def test_a_limit_is_changed_where_it_stands(house: House, page: Page) -> None:
    """What is typed is kept with Enter; what the gateway refuses stays in its field, with the reason beside it."""
    team_id, _ = new_team(house, limits={"usd_per_day": 7, "requests_per_minute": 60})
    enter(page, house, house.admin_key, "budgets", team=team_id)
    field = f"dialog [aria-label='usd per day of {team_id}']"
    page.fill(field, "-3")
    page.press("Enter")
    page.wait("document.querySelector('dialog .bad[role=alert]') !== null")
    kept = page.look(f"document.querySelector({json.dumps(field)}).value")
    page.fill(field, "9.5")
    page.press("Enter")
    page.wait_text("left of $9.50")
    page.fill(
        f"dialog [aria-label='requests per minute of {team_id}']", "1e400"
    )  # no number that JSON has, and no end of the limit
    page.press("Enter")
    page.wait("document.querySelector('dialog .bad[role=alert]') !== null")
    with house.client(house.admin_key) as admin:
        limits = admin.get(f"/admin/teams/{team_id}").json()["limits"]

    assert kept == "-3"
    assert (limits["usd_per_day"], limits["requests_per_minute"]) == (9.5, 60)


def limits_of(admin: httpx.Client, team_id: str) -> dict[str, Any]:
    """Return the limits of a team's end users."""
    found: dict[str, Any] = admin.get(f"/admin/teams/{team_id}").raise_for_status().json()["user_limits"]
    return found


def test_limits_of_end_users_are_set_where_they_stand(house: House, page: Page) -> None:
    """A name that is typed has a row; what each has used is asked for by a button; taken away, it is gone."""
    team = PayingTeam(house)
    with house.client(house.admin_key) as admin:
        limited = {"user_limits": {"*": {"usd_per_day": 7}}, "model_limits": {"small": {"usd_per_month": 3}}}
        admin.patch(f"/admin/teams/{team.id}", json=limited).raise_for_status()
        team.ask(user="ann")
        team.settled()

        enter(page, house, house.admin_key, "budgets", team=team.id)
        page.wait_text("For end users")
        users = "[...document.querySelectorAll('dialog section')].find(e => e.innerText.startsWith('For end users'))"
        page.look(f"{users}.querySelector('[name=name]').focus()")
        page.type("ann")
        page.press("Enter")
        page.fill("dialog [aria-label='$ a day of ann']", "2.5")
        page.press("Enter")
        until(lambda: "ann" in limits_of(admin, team.id))
        page.click("Used by each user")
        page.wait_text("Left today")
        text, set_to = page.text(), limits_of(admin, team.id)
        page.click("Remove the limits of ann")
        until(lambda: "ann" not in limits_of(admin, team.id))
        left = limits_of(admin, team.id)

    assert "At small" in text and re.search(r"Left this month ann \$0\.0000\d\d", text)
    assert (set_to["ann"]["usd_per_day"], left.keys()) == (2.5, {"*"})


def test_a_team_brings_a_key_for_a_provider(house: House, page: Page) -> None:
    """It is known by its fingerprint from then on; what the gateway refuses is told, and what was typed stays."""
    team_id, _ = new_team(house)
    enter(page, house, house.admin_key, "teams", team=team_id)
    page.click("Own accounts at providers", "summary")
    page.fill("dialog [name=provider]", "upstrem")
    page.fill("dialog [name=key]", "sk-of-the-team")
    page.press("Enter")
    page.wait_text("Dismiss")
    kept = page.look("document.querySelector('dialog [name=key]').value")
    page.fill("dialog [name=provider]", "upstream")
    page.press("Enter")
    fingerprint = hashlib.sha256(b"sk-of-the-team").hexdigest()[:8]
    page.wait_text(f"upstream {fingerprint}")
    page.look("globalThis.confirm = () => true")
    page.click(f"Erase {fingerprint}")
    page.wait_text("its calls go with the deployment’s keys")

    assert kept == "sk-of-the-team"


def test_tools_lead_to_their_calls(house: House, page: Page, mcp: ScriptedMcp) -> None:
    """Each tool that a key may call, with its price; a refused call leads there, and a tool to the calls of it."""
    mcp.forget()
    team = PayingTeam(house)
    version = "2026-07-28"
    meta = {"io.modelcontextprotocol/protocolVersion": version, "io.modelcontextprotocol/clientCapabilities": {}}
    with house.client(team.key) as client:
        for tool in ("close", "purge"):
            headers = {"mcp-protocol-version": version, "mcp-method": "tools/call", "mcp-name": tool}
            params = {"name": tool, "arguments": {}, "_meta": meta}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            request_id = client.post("/mcp/tickets", json=body, headers=headers).headers["x-request-id"]
            until(lambda of=request_id: client.get(f"/v1/calls/{of}").status_code == 200)

    enter(page, house, team.key, "calls", call=request_id)
    page.wait_text("tool not allowed")
    page.click("The tools that this key may call")
    page.wait_text("close $0.01")
    page.click("7 days of close at tickets")
    page.wait_text("answered mcp/tickets/close")

    assert page.look("document.querySelectorAll('tbody tr').length") == 1


def test_calls_do_not_move_while_they_are_looked_at(house: House, page: Page) -> None:
    """New calls show as they end; while the focus is in the list it stands still and tells how many are above."""
    team = PayingTeam(house)
    team.ask()
    team.settled()
    rows = "document.querySelectorAll('tbody tr').length"
    enter(page, house, team.key, "calls")
    page.wait(f"{rows} === 1")
    team.ask()
    page.wait(f"{rows} === 2")
    page.look("document.querySelector('tbody a').focus()")
    team.ask()
    page.wait_text("1 new above")
    held = page.look(rows)
    page.look("document.activeElement.blur()")
    page.wait(f"{rows} === 3")

    assert held == 2


def test_calls_come_by_the_stream(house: House, page: Page) -> None:
    """Answered and refused ones, without a look at the list; none while it is paused, then all that were missed."""
    team = PayingTeam(house)
    rows = "[...document.querySelectorAll('tbody tr')].map((each) => each.children[1].innerText.split(' ')[0])"
    enter(page, house, team.key, "calls")
    page.wait_text("As they end")
    page.wait("Boolean(document.querySelector('.empty'))")
    asked = asked_of_api(page).count("/v1/calls")
    team.ask()
    with house.client(team.key) as client:
        client.post("/v1/chat/completions", json={"model": "none", "messages": [{"role": "user", "content": "x"}]})
    page.wait(f"{rows}.join() === 'refused,answered'")
    looks = asked_of_api(page).count("/v1/calls")
    page.click("Pause")
    page.wait_text("Paused")
    team.ask()
    team.settled()
    paused = page.look(f"{rows}.length")
    page.click("Go on")
    page.wait(f"{rows}.join() === 'answered,refused,answered'")

    assert looks == asked
    assert paused == 2


def test_what_the_stream_brings_takes_no_call_out_of_the_list(house: House, page: Page) -> None:
    """Those that fit stay among many that do not, and older pages go on below the last one that is shown."""
    ask = """import("/console/views/calls.js").then(({ keep, olderThan, withTold }) => {
      const call = (number, status) => ({ type: "call", request_id: String(1000 + number), status });
      const status = (place) => (place === 599 ? "failed" : "answered"); // of the oldest, and of all others
      const events = Array.from({ length: 600 }, (_, place) => call(600 - place, status(place)));
      const page = { data: [call(0, "failed")], next: null };
      const few = withTold(page.data, events.slice(598), {});
      const many = withTold(page.data, keep(events, {}), {});
      const failed = withTold(page.data, keep(events, { status: "failed" }), { status: "failed" });
      return { few: few.map((each) => each.request_id), failed: failed.map((each) => each.request_id),
        many: [many.length, many.at(-1).request_id], older: [olderThan(page, few), olderThan(page, many)] };
    })"""
    page.open(f"{house.url}/console")

    assert page.look(ask) == {
        "few": ["1002", "1001", "1000"],
        "failed": ["1001", "1000"],
        "many": [50, "1551"],
        "older": [None, "1551"],
    }


def test_calls_are_looked_for_where_no_stream_is_to_be_had(house: House, page: Page) -> None:
    """A team watches twice at once at a process: its third page asks for the list every two seconds."""
    team = PayingTeam(house)
    with house.client(team.key) as client, client.stream("GET", "/v1/live"), client.stream("GET", "/v1/live"):
        enter(page, house, team.key, "calls")
        page.wait_text("Every 2 seconds, seen")
        team.ask()
        page.wait("document.querySelectorAll('tbody tr').length === 1")


def test_a_teams_admin_asks_for_no_stream(house: House, page: Page) -> None:
    """None is offered to it: its team's calls are looked for."""
    team = PayingTeam(house)
    with house.client(house.admin_key) as admin:
        made = admin.post("/admin/admin-keys", json={"role": "team-admin", "team_id": team.id}).json()
    enter(page, house, made["key"], "calls")
    page.wait_text("Every 2 seconds, seen")
    team.ask()
    page.wait("document.querySelectorAll('tbody tr').length === 1")

    assert not [url for url in page.asked if "/admin/live" in url and "team_id" in url]  # once it is known who asks


def test_what_was_seen_stays_while_the_gateway_is_away(house: House, page: Page) -> None:
    """The error stands beside it, and goes when the gateway answers again."""
    team = PayingTeam(house)
    team.ask()
    team.settled()
    away = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    enter(page, house, team.key, "calls")
    page.wait("Boolean(document.querySelector('tbody a'))")
    page.ask("Network.emulateNetworkConditions", offline=True, **away)
    page.wait_text("The gateway does not answer.")
    rows = page.look("document.querySelectorAll('tbody tr').length")
    page.ask("Network.emulateNetworkConditions", offline=False, **away)
    page.click("Try again")
    page.wait("!document.querySelector('.problem')")

    assert rows == 1


def test_what_is_typed_outlives_the_key_that_ends(house: House, page: Page) -> None:
    """A reader who may see the same goes on where the form stands; one of another team sees nothing of it."""
    (team_id, _), (_, other) = new_team(house), new_team(house)
    with house.client(house.admin_key) as admin:
        second, third = (admin.post("/admin/keys", json={"team_id": team_id}).json() for _ in range(2))
        enter(page, house, second["key"], "playground")
        page.fill("#prompt", "a long thought")
        for ended, key, kept in ((second, third["key"], True), (third, other, False)):
            page.wait_text(f"Team {team_id}")  # the page knows whose key it is, so whose page to keep
            admin.delete(f"/admin/keys/{ended['key_id']}").raise_for_status()
            page.look("document.querySelector('#prompt').focus()")
            page.press("Enter")
            page.wait_text("What you have typed is still there.")
            page.fill("#again", "tg-wrong")
            page.press("Enter")
            page.wait("document.querySelectorAll('dialog [role=alert]').length === 2")
            page.fill("#again", key)
            page.press("Enter")
            page.wait("!document.querySelector('dialog')")
            page.wait(f"document.querySelector('#prompt').value === {json.dumps('a long thought' if kept else '')}")


def test_a_deleted_team_is_told_from_a_suspended_one(house: House, page: Page) -> None:
    """Its keys are there to be looked up, and nothing of it can be changed."""
    team_id, _ = new_team(house)
    with house.client(house.admin_key) as admin:
        admin.delete(f"/admin/teams/{team_id}", params={"confirm": team_id}).raise_for_status()
    enter(page, house, house.admin_key, "teams", team=team_id)
    page.wait_text("its books stay")
    page.wait_text("revoked")

    assert page.look("document.querySelector('dialog .state').innerText") == "deleted"
    assert page.look("[...document.querySelectorAll('dialog button')].map((each) => each.innerText)") == ["Close"]


class Clicks:
    """A reader's hands that count what they click; what is typed, and Enter, are none."""

    def __init__(self, page: Page) -> None:
        self._page, self.count = page, 0

    def on(self, words: str) -> None:
        """Click on what reads, or is named, so."""
        self.count += 1
        self._page.click(words)

    def into(self, selector: str, words: str) -> None:
        """Click into a field, type there, and press Enter."""
        self.count += 1
        self._page.fill(selector, words)
        self._page.press("Enter")


def test_questions_are_answered_in_three_clicks(house: House, page: Page) -> None:
    """Each of docs/console.md that the console answers, from the overview on."""
    team = PayingTeam(house, usd_per_day=7)
    line = {"custom_id": "a", "body": {"model": "small", "messages": [{"role": "user", "content": "x"}]}}
    with house.client(team.key) as client, house.client(house.admin_key) as admin:
        refused = client.post("/v1/chat/completions", json=line["body"] | {"model": "none"}).headers["x-request-id"]
        batch = client.post("/v1/batch", json={"requests": [line]}).raise_for_status().json()["batch_id"]
        admin.patch(f"/admin/teams/{team.id}", json={"limits": {"usd_per_day": 8}}).raise_for_status()
    cached = team.book(attempts=(Attempt("up/a/http://a/v1/small", "cached", 0.0),))
    team.book(provider="azure", status=Status.FAILED, total_ms=77_000)
    team.book(SetClock(time.time() - 86_400), cost_nanousd=to_nano(90_000))
    search, rows, taken = "header input[type=search]", "document.querySelectorAll('tbody tr').length", {}

    def clicks(question: str) -> Clicks:
        page.open(f"{house.url}/console/overview")
        page.wait_text("Needs attention")
        return taken.setdefault(question, Clicks(page))

    enter(page, house, team.key)
    clicks("Why was my call refused?").into(search, refused)
    page.wait_text("The models that there are")
    clicks("Was it hedged, cached, redacted?").into(search, cached)
    page.wait_text("up/a small: from the cache")
    hands = clicks("Which calls took longest?")
    hands.on("Calls")
    page.wait("Boolean(document.querySelector('.chips select'))")
    hands.count += 1
    change = "e.value = 'min_ms'; e.dispatchEvent(new Event('change', { bubbles: true }))"
    page.look(f"(e => {{ {change} }})(document.querySelector('.chips select'))")
    hands.into("[aria-label='Its value']", "10000")
    page.wait(f"{rows} === 1")
    hands = clicks("What did batch B cost?")
    hands.on("Batches")
    page.wait(f"{rows} === 1")
    hands.count += 1
    page.look("document.querySelector('tbody a').click()")
    page.wait_text(f"Batch {batch}")
    page.wait_text("Cost $0.00")
    clicks("What is left of my budget?").on("Budgets")
    page.wait_text("left of $8.00")
    page.click("Sign out")
    enter(page, house, house.admin_key)
    hands = clicks("Who spent the most yesterday, and on what?")
    hands.on("Yesterday")
    page.wait(f"document.querySelector('tbody a')?.innerText === {json.dumps(team.id)}")
    hands.on(team.id)
    page.wait_text("gpt-4o 1")
    hands = clicks("Which provider failed between two and three tonight?")
    hands.on("Errors")
    hands.on("By provider")
    page.wait("document.querySelector('.legend')?.innerText.includes('azure')")
    hands = clicks("Who changed the limits of team T?")
    hands.on("Audit log")
    hands.into("[aria-label='Team']", team.id)
    hands.into("[aria-label^='Action']", "team.updated")
    page.wait_text("limits.usd_per_day 8")

    told = (Path(__file__).parents[2] / "docs" / "console.md").read_text()
    asked = re.findall(r"^\| (.+\?) \| (.+?) \| .*\|$", told, re.MULTILINE)
    assert {question for question, way in asked if way.strip()} == taken.keys()
    assert {question: hands.count for question, hands in taken.items() if hands.count > 3} == {}


SNIPPETS = {"curl": ["bash"], "Python": [sys.executable, "-"], "JavaScript": ["node", "--input-type=module", "-"]}


@pytest.mark.peers
@pytest.mark.parametrize("language", SNIPPETS)
def test_what_is_copied_runs_as_it_is(house: House, page: Page, upstream: ScriptedUpstream, language: str) -> None:
    """The same call as curl, Python or JavaScript, pasted into a shell, with a prompt that each would have to quote."""
    if shutil.which(SNIPPETS[language][0]) is None:
        pytest.skip(f"SKIPPED: {SNIPPETS[language][0]} is not installed")
    prompt = 'Don\'t say "$HOME", `id`, \\n or 100 % — say 你好 \U0001f44b\nin two lines'
    enter(page, house, house.team_key, "playground", models="small,large,claude,gemini", user="ann")
    page.fill("#prompt", prompt)
    page.look("navigator.clipboard.writeText = (text) => { globalThis.copied = text; return Promise.resolve(); }")
    page.click(f"Copy as {language}")
    snippet = page.wait("globalThis.copied")
    page.click("Send")
    page.wait("document.body.innerText.match(/tokens\\/s/g)?.length === 4")
    team = PayingTeam(house)
    done = subprocess.run(
        SNIPPETS[language],
        input=snippet,
        cwd=Path(__file__).parents[1] / "node",
        env=os.environ | {"TOLLGATE_KEY": team.key},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["choices"][0]["message"]["content"] if language == "curl" else done.stdout
    assert said.strip() and (upstream.requests[-1].body or {})["messages"] == [{"role": "user", "content": prompt}]


def test_no_view_is_wider_than_a_phone(house: House, page: Page) -> None:
    """At 360 pixels no view scrolls sideways, whatever the names in it."""
    new_team(house, name="a" * 100)
    page.resize(360, 780)
    widths = {}
    for key, views in ((house.admin_key, VIEWS), (house.team_key, [view for view in VIEWS if view not in FOR_ADMINS])):
        enter(page, house, key)
        for view in views:
            page.open(f"{house.url}/console/{view}")
            page.wait(READY)
            widths[view, key[:7]] = page.look("document.documentElement.scrollWidth")
        page.click("Sign out")

    assert set(widths.values()) == {360}, widths


def test_a_breaker_is_opened_and_reset(house: House, page: Page) -> None:
    """Opened by hand, its target is told first and in the overview; reset, all targets are called again."""
    enter(page, house, house.admin_key, "models")
    page.wait_text("targets are called")
    page.look("globalThis.confirm = () => true")
    try:
        page.click("Open small")
        page.wait_text("targets are not called")
        first = page.look("document.querySelector('tbody tr').innerText")
        page.click("Overview")
        page.wait_text("its breaker was opened by hand")
    finally:
        house.reset_breakers()
    page.click("Models")
    page.wait_text("targets are called")

    assert "small" in first and "opened by" in first


def test_what_a_role_may_not_do_has_no_button(house: House, page: Page) -> None:
    """Breakers are for operators, limits for admins; who may change neither sees both."""
    shown = {}
    with house.client(house.admin_key) as admin:
        made = {role: admin.post("/admin/admin-keys", json={"role": role}).json() for role in ("finance", "operator")}
    for role, key in ({role: one["key"] for role, one in made.items()} | {"admin": house.admin_key}).items():
        enter(page, house, key, "models")
        page.wait_text("targets are called")
        page.wait_text(f"{role.capitalize()} tgadmin-")
        breakers = "Reset" in page.text()
        page.click("Budgets")
        page.wait("Boolean(document.querySelector('tbody tr'))")
        shown[role] = breakers, page.look("Boolean(document.querySelector('tbody input'))")
        page.click("Sign out")

    assert shown == {"finance": (False, False), "operator": (True, False), "admin": (True, True)}


def test_a_batch_of_any_team_is_found_and_cancelled(house: House, page: Page) -> None:
    """By its URL: how far it is, and an end to it; the team's own page has it, too."""
    team = PayingTeam(house)
    requests = [{"custom_id": MARKUP, "body": {"model": "small", "messages": [{"role": "user", "content": "x"}]}}]
    with house.client(team.key) as client:
        batch_id = client.post("/v1/batch", json={"requests": requests}).raise_for_status().json()["batch_id"]

    enter(page, house, house.admin_key, "batches", team=team.id, batch=batch_id)
    page.wait_text("0 of 1")
    page.look("globalThis.confirm = () => true")
    page.click("Cancel")
    page.wait("/cancell(ing|ed)/.test(document.querySelector('dialog').innerText)")
    page.press("Escape")
    page.click("Sign out")
    enter(page, house, team.key, "batches")
    page.wait("/cancell(ing|ed)/.test(document.querySelector('tbody').innerText)")


@pytest.fixture
def large_house(upstream: ScriptedUpstream, tmp_path: Path, postgres_url: str) -> Iterator[House]:
    """A house of its own with a thousand teams, each of which owes a dollar today, a replica of the engine, and a pool
    of which a version is rolled out."""
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        own = ProviderSettings(name="own", format="openai", api_keys=("sk-own",), self_hosted=True, endpoints=())
        settings = settings_for(database_url, valkey.url, upstream.url, tmp_path)
        fleet = Fleet(secrets=("a secret of the fleet 0123",), pools={"own": Pool()})
        models = settings.models | {"small": replace(settings.models["small"], gpu_hour_nanousd=to_nano("3.5"))}
        settings = replace(settings, providers={**settings.providers, "own": own}, fleet=fleet, models=models)
        Redis.from_url(valkey.url).set(rollout_key("own"), msgspec.json.encode(ROLLING))
        with running_house(settings) as house:
            asyncio.run(book_of_many_teams(database_url))
            yield house


async def book_of_many_teams(database_url: str) -> None:
    """Make many teams, and book a call of each."""
    clock, database = Clock(), Database(database_url, pool_size=1)
    records = [make_record(clock.new_id(), team_id=name, cost_nanousd=to_nano(1)) for name in MANY]
    try:
        async with database.begin() as connection:
            await connection.execute(insert(teams), [{"id": name, "name": name} for name in MANY])
            await book_look(connection, look_at_a_replica(clock.now() + 600))  # not stale, however long the test takes
        for first in range(0, len(records), 200):  # a statement has five seconds
            async with database.begin() as connection:
                await insert_records(connection, records[first : first + 200], today=clock.today())
    finally:
        await database.close()


def look_at_a_replica(now: float) -> Look:
    """Return a replica that was busy for half of its hour, at $3.50."""
    load = {"instance_id": MARKUP, "model_id": "small", "gpu_node_id": None, "status": "active", "queue_depth": 3}
    load |= {"running": 5, "free_blocks": 25, "total_blocks": 100, "kv_utilization": 0.75, "tokens_per_second": 1234.5}
    load |= {"requests_per_second": 2.5, "prefix_hit_rate": 0.4, "uptime_seconds": 3600, "busy_seconds": 1800}
    load |= {"roofline_share": 0.62, "fairness": {"interactive": {"gap": 1200, "bound": 8400}}}
    facts: dict[str, Any] = {"provider": "own", "endpoint": "local http://gpu-0:8100/v1", "model": "small", "gpus": 1}
    times = {"alive_us": 3600 * SECOND, "busy_us": 1800 * SECOND, "seen_at": now}
    return Look(instance_id=MARKUP, gpu_hour_nanousd=to_nano("3.5"), load=load, **facts, **times)


def test_sums_are_of_all_teams_and_every_team_is_listed_page_by_page(large_house: House, page: Page) -> None:
    """However many teams there are, each view asks a handful of times; its sums are those of /admin/report."""
    with large_house.client(large_house.admin_key) as admin:
        total = admin.get("/admin/report").json()["total"]
    listed: list[str] = []

    enter(page, large_house, large_house.admin_key)
    page.wait_text("Cost $1,000.00")
    first = [urlsplit(url).path for url in page.asked].index("/admin/series")
    page.wait_text("Nothing.")
    overview, asked = page.text(), asked_of_api(page)
    page.click("7 days")
    page.wait_text("the 7 days before")
    page.click("30 days")
    page.wait_text("the 30 days before")
    month = page.text()
    page.click("Finance")
    page.wait_text("All 1,000")
    finance = page.text()
    page.click("Budgets")
    for number in range(5):
        page.wait(f"document.querySelector('tbody a')?.innerText === {json.dumps(MANY[200 * number])}")
        listed += page.look("[...document.querySelectorAll('tbody a')].map((each) => each.innerText)")
        assert "All teams $1,000.00" in page.text()
        if number < 4:
            page.click("Next teams")
    page.click("Engine fleet")
    page.wait_text("1,235 tokens/s")
    page.wait_text("own standing 10 % at the new version 0a1b 0c2d")
    fleet = page.text()

    assert (float(total["cost_usd"]), total["requests"]) == (1000, 1000)
    assert first < 8
    assert "Requests 1,000" in overview and "Cost $1,000.00" in month
    assert "Charged to teams $1,000.00" in finance
    assert [name for name in listed if name in MANY] == MANY
    assert "1,235 tokens/s on 1 replica, 3 waiting" in fleet and "75 used, 25 left of 100" in fleet and MARKUP in fleet
    assert "Share of the roofline, while busy 62 %" in fleet
    assert "Fairness gap, interactive 1,200 of at most 8,400 weighted tokens" in fleet
    assert "50 %, $1.75" in fleet and "Idle since start $1.75" in fleet
    assert sorted(set(asked)) == ["/admin/me", "/admin/series"]
