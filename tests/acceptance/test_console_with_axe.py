# Every view of the console under axe-core, which npm brings: contrast, names, roles, order; for each role, over a house
# in the middle of its month and one where nothing was called yet, in both colour schemes, on a screen and on a phone.
# What another role was shown to the letter is not looked at again.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gateway.http.console
from tests.support.browser import READY, Browser, Page, browser
from tests.support.house import House, running_house, settings_for
from tests.support.rich_house import ROLES, keys_of, rich_house
from tests.support.scripted_mcp import ScriptedMcp
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey

AXE = Path(__file__).parents[1] / "node" / "node_modules" / "axe-core" / "axe.min.js"
FOUND = "axe.run(document, {resultTypes: ['violations']%s}).then((done) => done.violations.map(told))"
COLOURS = (
    ", runOnly: {type: 'rule', values: ['color-contrast', 'link-in-text-block']}"  # which the scheme alone changes
)
TOLD = "globalThis.told = (one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 120)).join(' ')}`; 0"
LOOKS = [(width, is_dark) for width in (1280, 390) for is_dark in (False, True)]
SHOWN = "[...document.querySelectorAll('nav, main, dialog')].map((each) => each.outerHTML).join()"
SETTLED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
VIEWS = {"team": 8, "viewer": 12, "finance": 12, "operator": 12, "team-admin": 8, "admin": 12}  # that each may see
# What lies over a view once it is opened: the link that opens it.
DRAWERS = {"calls": "tbody a", "batches": "tbody a", "budgets": "tbody a", "teams": "tbody a"}

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all of these."""
    if not AXE.is_file():
        pytest.skip("SKIPPED: axe-core is not in tests/node: npm install --prefix tests/node")
    with browser() as running:
        yield running


@pytest.fixture(scope="module", params=["rich", "empty"])
def stack(
    request: pytest.FixtureRequest,
    upstream: ScriptedUpstream,
    mcp: ScriptedMcp,
    tmp_path_factory: pytest.TempPathFactory,
    postgres_url: str,
) -> Iterator[tuple[House, dict[str, str], set[str]]]:
    """A house, a key of each role, and what was found to be clean."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "rich":
        with rich_house(upstream, mcp.url, folder, postgres_url) as house:
            yield house, keys_of(house), set()
        return
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        with running_house(settings_for(database_url, valkey.url, upstream.url, folder)) as house:
            yield house, keys_of(house), set()


@pytest.mark.parametrize("role", ["team", *ROLES])
def test_every_view_is_clean(stack: tuple[House, dict[str, str], set[str]], chromium: Browser, role: str) -> None:
    """Nothing is found in the sign-in, in any view of the role, or in what opens over it."""
    house, keys, clean = stack
    page = chromium.page()
    found: dict[str, dict[str, list[str]]] = {}

    page.open(f"{house.url}/console")
    found["sign-in"] = look(page, clean)
    page.fill("#key", keys[role])
    page.press("Enter")
    page.wait_text("Sign out")
    page.wait_text({"team": f"Team {house.team_id}"}.get(role, f"{role.capitalize()} tgadmin-"))
    views = page.look(
        "[...document.querySelectorAll('nav a')].map((each) => each.getAttribute('href').split('/').at(-1))"
    )
    for view in views:
        page.open(f"{house.url}/console/{view}" + ("?user=ann&models=small,none" if view == "playground" else ""))
        page.wait(READY)
        if view in ("playground", "routing") and role == "team":
            page.fill("#prompt", "What is two and two?")
            page.click("Send" if view == "playground" else "Explain")
            page.wait_text("tokens/s" if view == "playground" else "Left out")
        found[view] = look(page, clean)
        if view in DRAWERS and page.look(f"Boolean(document.querySelector({DRAWERS[view]!r}))"):
            page.look(f"document.querySelector({DRAWERS[view]!r}).click()")
            page.wait("Boolean(document.querySelector('#app[aria-busy=false] dialog .inside > * + *'))")
            page.look("document.querySelectorAll('dialog summary').forEach((each) => each.click())")
            page.wait("Boolean(document.querySelector('#app[aria-busy=false]'))")
            found[f"{view}, opened"] = look(page, clean)
    page.close()

    assert {view: what for view, what in found.items() if what} == {}
    assert len(views) == VIEWS[role] and set(views) <= gateway.http.console.VIEWS


def look(page: Page, clean: set[str]) -> dict[str, list[str]]:
    """Return what axe finds in what is shown, in each width and colour scheme, where it was not shown before."""
    page.resize(1280, 800)
    page.look(SETTLED)
    if (shown := page.look(SHOWN)) in clean:
        return {}
    page.look(AXE.read_text() + TOLD)
    found = {}
    for width, is_dark in LOOKS:
        page.resize(width, 800, is_dark=is_dark)
        page.look(SETTLED)
        if seen := page.look(FOUND % (COLOURS if is_dark else "")):
            found[f"{width}, {'dark' if is_dark else 'light'}"] = seen
    if not found:
        clean.add(shown)
    return found
