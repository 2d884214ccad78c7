# /console: a page for people, of ES modules without a build. It holds no secret and asks nothing of the server but
# these files; what it shows comes through the public API with the key that its reader gives it, or with a session.

from __future__ import annotations

from contextlib import suppress
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path

from litestar import Response, get
from litestar.params import FromPath

from gateway.accounts.guards import SESSION, cookie_name, identify, open_guard, read_cookie
from gateway.accounts.serializers import identity_view
from gateway.core.json_text import to_json
from gateway.core.principals import Admin
from gateway.http.exchange import AnyRequest
from protocol.errors import NotFound, ServiceError

FOLDER = Path(__file__).parent
PAGE = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {
    path.relative_to(FOLDER).as_posix(): MEDIA_TYPES[path.suffix]
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in MEDIA_TYPES
}
VIEWS = {Path(name).stem for name in FILES if name.startswith("views/")}  # each is an address of the page

# Only our own files run, only our own API is called, and no other page may frame this one.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@get("/console", guards=[open_guard], include_in_schema=False)
async def show_page(request: AnyRequest) -> Response[bytes]:
    """Return the console page."""
    return await _page(request)


@get("/console/{name:str}", guards=[open_guard], include_in_schema=False)
async def show_part(request: AnyRequest, name: FromPath[str]) -> Response[bytes]:
    """Return one of the page's parts, or the page itself at the address of a view."""
    return await _page(request) if name in VIEWS else _file(request, name)


@get("/console/{folder:str}/{name:str}", guards=[open_guard], include_in_schema=False)
async def show_part_of_folder(request: AnyRequest, folder: FromPath[str], name: FromPath[str]) -> Response[bytes]:
    """Return a view's module, or a library."""
    return _file(request, f"{folder}/{name}")


async def _page(request: AnyRequest) -> Response[bytes]:
    """Return the page. It tells where people sign in, and who the session of its reader is, so that none has to ask."""
    settings = request.app.state.editions.current.settings.sign_in
    if settings is None:
        return _file(request, PAGE)
    told = {"name": settings.name, "identity": None}
    if read_cookie(request, cookie_name(settings.public_url, SESSION)) is not None:
        with suppress(ServiceError):  # it has ended, or the database is away: the page comes all the same
            admin = await identify(request)
            told["identity"] = identity_view(admin) if isinstance(admin, Admin) else None
    meta = f'<meta name="sign-in" content="{escape(to_json(told).decode())}">\n  <title>'
    content = _content(PAGE)[0].replace(b"<title>", meta.encode(), 1)
    return Response(content, media_type=FILES[PAGE], headers=HEADERS | {"cache-control": "no-store"})


def _file(request: AnyRequest, name: str) -> Response[bytes]:
    """Return a part, or 304 where the browser still has it."""
    if name not in FILES:
        raise NotFound("The console has no such part.", code="unknown_url")
    content, tag = _content(name)
    headers = HEADERS | {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(b"", status_code=304, media_type=FILES[name], headers=headers)
    return Response(content, media_type=FILES[name], headers=headers)


@cache
def _content(name: str) -> tuple[bytes, str]:
    """Return a file, and the tag of its content."""
    content = (FOLDER / name).read_bytes()
    return content, f'"{sha256(content).hexdigest()}"'
