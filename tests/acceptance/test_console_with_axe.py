# Every view of the console under axe-core, which npm brings: contrast, names, roles, order, in both colour schemes, on
# a screen and on a phone.

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browser import READY, browser
from tests.support.house import House
from tests.support.paying_team import PayingTeam

AXE = Path(__file__).parents[1] / "node" / "node_modules" / "axe-core" / "axe.min.js"
FOR_TEAMS = ("overview", "calls", "budgets", "models", "tools", "playground", "routing", "batches")
FOR_ADMINS = (*FOR_TEAMS, "teams", "fleet", "finance", "audit")
FOUND = "axe.run(document, {resultTypes: ['violations']}).then((done) => done.violations.map(told))"
TOLD = "const told = (one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 120)).join(' ')}`; 0"

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_every_view_is_clean(house: House, width: int, *, is_dark: bool) -> None:
    """Nothing is found in the sign-in, in any view of a team or an admin, or in the drawers of a call and a team."""
    if not AXE.is_file():
        pytest.skip("SKIPPED: axe-core is not in tests/node: npm install --prefix tests/node")
    team = PayingTeam(house, usd_per_day=7)
    with house.client(house.admin_key) as admin:
        limited = {"user_limits": {"*": {"usd_per_day": 7}}, "tag_limits": {"agent=*": {"usd_per_day": 7}}}
        admin.patch(f"/admin/teams/{team.id}", json=limited).raise_for_status()
    team.ask(user="ann")
    team.settled()
    found = {}
    with browser() as chromium:
        for key, views in ((team.key, FOR_TEAMS), (house.admin_key, FOR_ADMINS)):
            page = chromium.page(width, is_dark=is_dark)
            page.open(f"{house.url}/console")
            page.look(AXE.read_text() + TOLD)
            found["sign-in"] = page.look(FOUND)
            page.fill("#key", key)
            page.press("Enter")
            page.wait_text("Sign out")
            drawers = (f"budgets?team={team.id}", f"teams?team={team.id}") if key == house.admin_key else ()
            for view in (*views, *drawers):
                page.open(f"{house.url}/console/{view}")
                page.wait(READY)
                if view == "calls":
                    page.wait("Boolean(document.querySelector('tbody a'))")
                    page.look("document.querySelector('tbody a').click()")
                    page.wait_text("Request")
                page.wait("document.querySelector('dialog')?.innerText.includes('Close') ?? true")
                if view.startswith("teams?"):
                    page.click("Safety and contents", "summary")
                    page.click("Own accounts at providers", "summary")
                    page.wait_text("Bring a key")
                page.look(AXE.read_text() + TOLD)
                found[view, key[:7]] = page.look(FOUND)

    assert {view: what for view, what in found.items() if what} == {}
    assert len(found) == 1 + len(FOR_TEAMS) + len(FOR_ADMINS) + 2
