# People who sign in, and programs that come with tokens of the company's identity provider: a gateway beside the house,
# on the same database, in front of a real OpenID provider (npm's oidc-provider) where Node is, and of a scripted one.

from __future__ import annotations

import asyncio
import html
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.accounts.admin_keys import begin_session
from gateway.core.principals import Person, Role
from gateway.core.settings import SignIn, TokenIssuer
from gateway.run.processes import free_port
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from tests.support.browser import browser
from tests.support.house import House, serving
from tests.support.identity_provider import IdentityProvider, listening

FOLDER = Path(__file__).parents[1] / "node"
AUDIENCE = "tollgate-api"
NOT_HERE = "http://127.0.0.1:9"
CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    """A scripted one, which signs what a test asks for."""
    with listening() as provider:
        yield provider


@pytest.fixture(scope="module")
def real() -> Iterator[str | None]:
    """The issuer of a real one; nothing where Node or the package is absent. It redirects to the port that follows."""
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules" / "oidc-provider").is_dir():
        yield None
        return
    command = [node, str(FOLDER / "identity_provider.mjs"), f"http://127.0.0.1:{PORT}/console/sign-in/callback"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(10)


PORT = free_port()  # of the gateway, which its public URL names


@pytest.fixture(scope="module")
def gate(
    house: House, provider: IdentityProvider, real: str | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    """A gateway where people sign in; its key of team_a is the house's."""
    public_url = f"http://127.0.0.1:{PORT}"
    sign_in = SignIn(
        issuer=real or provider.issuer,
        client_id="tollgate",
        client_secret="a secret & more",
        public_url=public_url,
        name="Example <AG>",
        roles={"admins": "admin", "viewers": "viewer"},
        team_admins={"leads": "team_a"},
    )
    services = {"burst": "team_a", "services": "team_a", "batch jobs": "team_a", "elsewhere": "no_such_team"}
    jwt_auth = [
        TokenIssuer(issuer=each, audience=(AUDIENCE,), teams=services) for each in (provider.issuer, real) if each
    ]
    data_dir = tmp_path_factory.mktemp("gate")
    settings = replace(house.settings, sign_in=sign_in, jwt_auth=tuple(jwt_auth), data_dir=data_dir)
    with serving(settings, port=PORT) as url:
        assert url == public_url
        yield House(url, house.team_id, house.team_key, house.admin_key, settings)


def session(gate: House, role: Role, team_id: str | None = None, lasts: float = 60) -> str:
    """Return the cookie's value of a new session."""

    async def begin() -> str:
        database = Database(gate.settings.database_url)
        try:
            async with database.begin() as connection:
                person = Person(subject="0815", email="eve@company.test", role=role, team_id=team_id)
                return await begin_session(
                    connection, gate.settings.key_pepper, person, Act(f"person:{person.name}"), time.time() + lasts
                )
        finally:
            await database.close()

    return asyncio.run(begin())


def client_of(gate: House, cookie: str | None, **headers: str) -> httpx.Client:
    cookies = {} if cookie is None else {"tollgate_session": cookie}
    return httpx.Client(base_url=gate.url, cookies=cookies, headers=headers, timeout=30)


def at_provider(client: httpx.Client, answer: httpx.Response, login: str) -> httpx.Response:
    """Fill in the provider's forms, until it sends the browser back to the gateway."""
    for _ in range(8):
        while answer.is_redirect and "/console/sign-in/callback" not in answer.headers["location"]:
            answer = client.send(answer.next_request)  # type: ignore[arg-type]
        if answer.is_redirect:
            return client.send(answer.next_request)  # type: ignore[arg-type]
        action = html.unescape(re.findall(r'action="([^"]+)"', answer.text)[0])
        prompt = re.findall(r'name="prompt" value="(\w+)"', answer.text)[0]
        form = {"prompt": prompt, **({"login": login, "password": "x"} if prompt == "login" else {})}
        answer = client.post(answer.url.join(action), data=form)
    raise AssertionError(answer.text)


# ---- people


def test_a_person_signs_in_at_a_real_provider(gate: House, house: House, real: str | None) -> None:
    """The code flow, PKCE, state and nonce; a cookie that no script reads; acts in the person's name; and out again."""
    if real is None:
        pytest.skip("SKIPPED: Node or npm's oidc-provider is not installed: npm install --prefix tests/node")
    with httpx.Client(timeout=30) as client:
        first = client.get(f"{gate.url}/console/sign-in", params={"there": "/console/audit?team=team_a"})
        done = at_provider(client, first, "ada:staff,admins")
        (cookie,) = [each for each in done.headers.get_list("set-cookie") if each.startswith("tollgate_session=")]
        me = client.get(f"{gate.url}/admin/me").json()
        name = {"name": "made by Ada"}
        made = client.post(f"{gate.url}/admin/keys", json={"team_id": "team_a"} | name, headers={"origin": gate.url})
        log = client.get(f"{gate.url}/admin/audit-log", params={"team_id": "team_a"}).json()["data"]
        token = client.cookies["tollgate_session"]
        out = client.post(f"{gate.url}/console/sign-out", headers={"origin": gate.url})
        after = client_of(gate, token).get("/admin/me")
    with house.client(house.admin_key) as admin:
        every = admin.get("/admin/audit-log", params={"action": "session.began"}).json()["data"]

    assert (done.status_code, done.headers["location"]) == (303, "/console/audit?team=team_a")
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert (me["role"], me["name"]) == ("admin", "ada@company.test")
    assert me["person"] == "ada@company.test (ada:staff,admins)" and me["actor"] == f"person:{me['person']}"
    assert made.status_code == 201
    assert (log[0]["actor"], log[0]["action"]) == (me["actor"], "key.created")
    assert every[0]["actor"] == me["actor"]
    assert (out.status_code, after.status_code) == (200, 401)
    assert "tollgate_session" not in client.cookies


def test_a_person_without_a_role_stays_outside(gate: House, real: str | None) -> None:
    """The console has words for it; and for an answer of the provider that this browser did not ask for."""
    if real is None:
        pytest.skip("SKIPPED: Node or npm's oidc-provider is not installed: npm install --prefix tests/node")
    with httpx.Client(timeout=30) as client:
        done = at_provider(client, client.get(f"{gate.url}/console/sign-in"), "bob:staff")
        foreign = client.get(f"{gate.url}/console/sign-in/callback?code=x&state=y")

    assert done.headers["location"] == "/console?refused=no_role"
    assert foreign.headers["location"] == "/console?refused=expired"
    assert "tollgate_session" not in client.cookies


def test_a_session_has_the_rights_of_its_role(gate: House) -> None:
    """No more than a key of that role; a team's admin has its own team."""
    with client_of(gate, session(gate, Role.VIEWER), origin=gate.url) as viewer:
        seen, refused = viewer.get("/admin/teams"), viewer.post("/admin/teams", json={"id": "x"})
        of_team = viewer.get("/v1/calls")
        made = [client.post("/v1/chat/completions", json=CHAT) for client in (viewer, httpx.Client(base_url=gate.url))]
    with client_of(gate, session(gate, Role.TEAM_ADMIN, "team_a"), origin=gate.url) as lead:
        own, others = lead.get("/admin/keys?team_id=team_a"), lead.get("/admin/keys?team_id=team_b")
        me = lead.get("/admin/me").json()

    assert (seen.status_code, refused.status_code, of_team.status_code) == (200, 403, 403)
    assert [each.status_code for each in made] == [403, 401]  # a session calls no model
    assert (own.status_code, others.status_code) == (200, 403)
    assert (me["role"], me["team_id"]) == ("team-admin", "team_a")


@pytest.mark.parametrize("origin", [None, "https://evil.test", "null", "http://127.0.0.1"])
def test_no_other_page_changes_anything_by_a_session(gate: House, origin: str | None) -> None:
    """Browsers say where a change comes from; what does not come from our own page is refused, and nothing done."""
    headers = {} if origin is None else {"origin": origin}
    cookie = session(gate, Role.ADMIN)
    with client_of(gate, cookie, **headers) as page:
        refused = page.post("/admin/teams", json={"id": "team_of_evil"})
        out = page.post("/console/sign-out")
        read = page.get("/admin/teams/team_of_evil")

    assert {refused.status_code, out.status_code} == {403} and gate.url in refused.json()["error"]["message"]
    assert read.status_code == 404  # reading is no change, and the session still holds


def test_what_a_session_holds_is_no_key(gate: House, house: House) -> None:
    """Nor does it count where nobody signs in; beside a key, the key counts; ended or revoked, it is refused."""
    cookie, ended = session(gate, Role.ADMIN), session(gate, Role.ADMIN, lasts=-1)
    with client_of(gate, None, authorization=f"Bearer {cookie}") as client:
        as_key = client.get("/admin/me")
    with client_of(house, cookie) as client:
        elsewhere, none = client.get("/admin/me"), client.get("/console/sign-in")
    with client_of(gate, cookie, authorization=f"Bearer {gate.team_key}") as client:
        beside = client.get("/admin/me")
    with client_of(gate, ended) as client:
        late = client.get("/admin/me")
    with gate.client(gate.admin_key) as admin, client_of(gate, cookie) as client:
        (listed,) = [
            each
            for each in admin.get("/admin/admin-keys", params={"limit": 1000}).json()["data"]
            if each["person"] and each["status"] == "active" and each["role"] == "admin" and not each["revoked_at"]
        ][-1:]
        before = client.get("/admin/me").status_code
        admin.delete(f"/admin/admin-keys/{listed['key_id']}").raise_for_status()
        revoked = client.get("/admin/me")
        told = admin.get("/admin/audit-log", params={"action": "session.ended", "limit": 1}).json()["data"]

    assert [one["subject"] for one in told] == [listed["key_id"]]
    assert [each.status_code for each in (as_key, elsewhere, none, beside, late)] == [401, 401, 404, 403, 401]
    assert (before, revoked.status_code) == (200, 401) and "Sign in again" in revoked.json()["error"]["message"]
    assert listed["person"] == "eve@company.test (0815)" and cookie not in str(listed)


def test_the_console_lets_people_in_and_hides_what_they_may_not(gate: House, real: str | None) -> None:
    """From the button to the provider and back; a viewer sees the teams, and no button that changes one."""
    with browser() as running:
        page = running.page()
        if real is not None:
            page.open(f"{gate.url}/console/teams")
            page.click("Sign in with Example <AG>")
            page.fill("input[name=login]", "vera:viewers")
            page.fill("input[name=password]", "x")
            page.press("Enter")
            page.wait("document.body.innerText.includes('Continue') || location.pathname.startsWith('/console')")
            page.click("Continue", "button")
        else:
            page.ask("Network.setCookie", name="tollgate_session", value=session(gate, Role.VIEWER), url=gate.url)
            page.open(f"{gate.url}/console/teams")
        page.wait("Boolean(document.querySelector('tbody tr'))")
        text = page.text()
        page.open(f"{gate.url}/console/teams?team=team_a")  # where the house has many teams, it is on a later page
        page.wait_text("made 20")
        page.wait("Boolean(document.querySelector('dialog tbody tr'))")
        team = page.text()
        page.press("Escape")
        page.click("Sign out")
        page.wait_text("Sign in with the key")
        faults = list(page.faults)
        page.ask(
            "Network.setCookie", name="tollgate_session", value=session(gate, Role.TEAM_ADMIN, "team_a"), url=gate.url
        )
        page.open(f"{gate.url}/console/teams?team=team_a")
        page.wait_text("Where the new key is used")
        lead = page.text()
        page.press("Escape")
        for view, first in {"Overview": ".figures", "Calls": ".chips", "Models": "table", "Audit log": "table"}.items():
            page.click(view)
            shown = f"document.querySelector('main {first}')?.tagName"
            page.wait(f"document.querySelector('h1').innerText === '{view}' && {shown}")
            assert page.look("document.querySelectorAll('.problem').length") == 0, view

    assert "Viewer" in text and "New team" not in text
    assert "Rotate" not in team and "Suspend" not in team and "Where the new key is used" not in team
    assert "Team-admin eve@company.test" in lead and "Finance" not in lead and "Suspend" not in lead
    assert [fault for fault in faults + page.faults if "401" not in fault] == []


# ---- programs


def calls(gate: House, token: str, **body: Any) -> httpx.Response:
    with gate.client(token) as client:
        return client.post("/v1/chat/completions", json=CHAT | body)


def key_of(gate: House, answer: httpx.Response) -> dict[str, Any]:
    with gate.client(gate.admin_key) as admin:
        return dict(admin.get(f"/admin/keys/{gate.record_of(answer)['key_id']}").json())


def test_a_workload_calls_by_its_token_from_a_real_provider(gate: House, real: str | None) -> None:
    """An access token of the client credentials grant is a team's key; the books say which."""
    if real is None:
        pytest.skip("SKIPPED: Node or npm's oidc-provider is not installed: npm install --prefix tests/node")
    form = {"grant_type": "client_credentials"}
    token = httpx.post(f"{real}/token", data=form, auth=("job", "of a job")).raise_for_status().json()["access_token"]
    answer = calls(gate, token)
    key = key_of(gate, answer)

    assert answer.status_code == 200
    assert (key["team_id"], key["prefix"], key["name"]) == ("team_a", "jwt", "tokens of 127.0.0.1: services")


def test_a_token_stands_for_a_key_with_all_that_a_key_has(gate: House, provider: IdentityProvider) -> None:
    """One key for each value of the claim: with limits of its own, no secret, and revoked for every token at once."""
    token, other = (provider.token(aud=AUDIENCE, groups=[each]) for each in ("services", "batch jobs"))
    first, second = calls(gate, token), calls(gate, other)
    again = calls(gate, provider.token(aud=[AUDIENCE, "x"], groups=["staff", "services"], sub="another"))
    key = key_of(gate, first)
    with gate.client(gate.admin_key) as admin, gate.client(token) as client:
        rotated = [client.post("/v1/team/key/rotate"), admin.post(f"/admin/keys/{key['key_id']}/rotate")]
        as_admin = client.get("/admin/me")
        in_other_header = httpx.get(f"{gate.url}/v1/models", headers={"x-api-key": token})
        admin.patch(f"/admin/keys/{key['key_id']}", json={"limits": {"requests_per_minute": 0}}).raise_for_status()
        limited, free = calls(gate, token), calls(gate, other)
        admin.delete(f"/admin/keys/{key['key_id']}").raise_for_status()
        revoked = calls(gate, token)

    assert [each.status_code for each in (first, second, again, in_other_header)] == [200] * 4
    assert gate.record_of(again)["key_id"] == key["key_id"] != gate.record_of(second)["key_id"]
    assert [each.status_code for each in rotated] == [409, 409]
    assert rotated[0].json()["error"]["code"] == "key_has_no_secret"
    assert (as_admin.status_code, limited.status_code, free.status_code) == (403, 429, 200)
    assert revoked.status_code == 401 and "is revoked" in revoked.json()["error"]["message"]


def test_many_first_calls_at_once_make_one_key(gate: House, provider: IdentityProvider) -> None:
    """A workload that starts all its replicas at once: none is refused."""
    token = provider.token(aud=AUDIENCE, groups=["burst"])
    with ThreadPoolExecutor(8) as pool, gate.client(token) as client:
        answers = list(pool.map(lambda _: client.get("/v1/models").status_code, range(16)))
    with gate.client(gate.admin_key) as admin:
        keys = admin.get("/admin/keys", params={"team_id": "team_a", "limit": 1000}).json()["data"]

    assert answers == [200] * 16
    assert [key["name"] for key in keys if "burst" in key["name"]] == ["tokens of 127.0.0.1: burst"]


def test_a_wrong_token_is_told_why_and_shown_nowhere(
    gate: House, house: House, provider: IdentityProvider, capfd: pytest.CaptureFixture[str]
) -> None:
    """For another audience, expired, of a team that is not here, of another issuer; and where no token is taken."""
    groups = ["services"]
    tokens = {
        "is for another audience": provider.token(groups=groups),
        "has expired": provider.token(aud=AUDIENCE, groups=groups, exp=time.time() - 60),
        "there is no such team": provider.token(aud=AUDIENCE, groups=["elsewhere"]),
        "no value that stands for a team": provider.token(aud=AUDIENCE, groups=["staff"]),
        "none of `jwt_auth`": provider.token(aud=AUDIENCE, iss=NOT_HERE, groups=groups),
    }
    answers = {why: calls(gate, token) for why, token in tokens.items()}
    outside = calls(house, provider.token(aud=AUDIENCE, groups=groups))
    told = capfd.readouterr()

    assert {answer.status_code for answer in answers.values()} == {401} == {outside.status_code}
    for why, answer in answers.items():
        assert why in answer.json()["error"]["message"]
        assert not any(part in answer.text + told.out + told.err for part in tokens[why].split("."))
