# /console/sign-in: people sign in at their identity provider, and what they get is a session in a cookie that no script
# can read. /admin/me: who an admin's key or session is.

from __future__ import annotations

from urllib.parse import urlencode

import structlog
from litestar import Response, get, post
from litestar.datastructures import Cookie

from gateway.accounts.admin_keys import begin_session, revoke_admin_key
from gateway.accounts.auth import Authenticator
from gateway.accounts.guards import SESSION, cookie_name, identify, open_guard, read_cookie, team_reading_guard
from gateway.accounts.serializers import identity_view
from gateway.core.client_addresses import client_of
from gateway.core.clock import Clock
from gateway.core.parts import Parts
from gateway.core.principals import Admin
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, act_of, admin_of, answer, own_act, part_of, read_query, transaction
from gateway.identity.sign_in import CALLBACK, FORGOTTEN_AFTER, NotSignedIn, SignInFlow
from protocol.errors import NotFound

PATH = "/console/sign-in"
MEMORY = "tollgate_sign_in"  # the cookie of a sign-in that goes on

log = structlog.get_logger(__name__)


@get(PATH, guards=[open_guard], include_in_schema=False)
async def begin_sign_in(request: AnyRequest) -> Response[bytes]:
    """Send a person to the identity provider; ``there`` is the address of the console to come back to."""
    flow = _flow_of(request)
    try:
        url, memory = await flow.begin(request.query_params.get("there", "/console"))
    except NotSignedIn as exc:
        return _back(flow, exc)
    return _go(url, _cookie(flow, MEMORY, memory, FORGOTTEN_AFTER))


@get(CALLBACK, guards=[open_guard], include_in_schema=False)
async def finish_sign_in(request: AnyRequest) -> Response[bytes]:
    """Let in the person who comes back from the identity provider."""
    flow, now = _flow_of(request), part_of(request, Clock).now()
    request.scope["state"]["address"] = client_of(request.scope, edition_of(request).settings.trusted_proxies)
    said = dict(request.query_params.items())
    ends_at = now + flow.settings.session
    try:
        person, there = await flow.finish(read_cookie(request, cookie_name(flow.settings.public_url, MEMORY)), said)
        pepper = edition_of(request).settings.key_pepper
        try:
            async with transaction(request) as connection:
                act = own_act(request, f"person:{person.name}")
                token = await begin_session(connection, pepper, person, act, ends_at)
        except NotFound:
            raise NotSignedIn("no_role", f"there is no team {person.team_id!r}") from None
    except NotSignedIn as exc:
        return _back(flow, exc)
    return _go(there, _cookie(flow, MEMORY, "", 0), _cookie(flow, SESSION, token, flow.settings.session))


@post("/console/sign-out", guards=[open_guard], status_code=200, include_in_schema=False)
async def sign_out(request: AnyRequest) -> Response[bytes]:
    """End the session of the cookie, at every gateway."""
    flow = _flow_of(request)
    caller = await identify(request)
    if not isinstance(caller, Admin) or caller.person is None:
        raise NotFound("There is no session to end: this is a key.", code="no_session")
    async with transaction(request) as connection:
        await revoke_admin_key(connection, caller.fingerprint, act_of(request))
    part_of(request, Authenticator).forget()
    done = answer({"object": "session", "signed_out": True})
    done.cookies.append(_cookie(flow, SESSION, "", 0))
    return done


@get("/admin/me", guards=[team_reading_guard], summary="Show who an admin key or a session is")
async def get_identity(request: AnyRequest) -> Response[bytes]:
    """Return the role, name and end of the key or session that asks."""
    read_query(request)
    return answer(identity_view(admin_of(request)), headers={"cache-control": "no-store"})


def _flow_of(request: AnyRequest) -> SignInFlow:
    parts: Parts = request.app.state.parts
    flow = parts.find(SignInFlow)
    if flow is None:
        raise NotFound("No person signs in here: tollgate.yaml has no `sign_in`. Use a key.", code="no_sign_in")
    return flow


def _back(flow: SignInFlow, why: NotSignedIn) -> Response[bytes]:
    """Send a person back to the console, which has words for the reason; the log has the details."""
    if why.reason != "expired":  # which every stranger can bring about
        log.warning("sign_in_refused", reason=why.reason, why=str(why))
    return _go(f"/console?{urlencode({'refused': why.reason})}", _cookie(flow, MEMORY, "", 0))


def _go(url: str, *cookies: Cookie) -> Response[bytes]:
    headers = {"location": url, "cache-control": "no-store", "referrer-policy": "no-referrer"}
    return Response(b"", status_code=303, headers=headers, cookies=cookies)


def _cookie(flow: SignInFlow, name: str, value: str, seconds: float) -> Cookie:
    whole = cookie_name(flow.settings.public_url, name)
    return Cookie(
        whole, path="/", value=value, max_age=int(seconds), secure=flow.is_private, httponly=True, samesite="lax"
    )
