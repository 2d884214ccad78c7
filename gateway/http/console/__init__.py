# /console: one web page, in plain HTML, CSS and JavaScript without a build. It holds no secret and asks nothing
# of the server but these files; what it shows comes through the public API with the key that its reader gives it.

from __future__ import annotations

from functools import cache
from pathlib import Path

from litestar import Response, get
from litestar.params import FromPath

from gateway.accounts.auth import open_guard
from protocol.errors import NotFound

FOLDER = Path(__file__).parent
MEDIA_TYPES = {
    "index.html": "text/html",
    "console.css": "text/css",
    "console.js": "text/javascript",
    "api.js": "text/javascript",
    "admin.js": "text/javascript",
    "team.js": "text/javascript",
    "dom.js": "text/javascript",
}

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
async def show_page() -> Response[bytes]:
    """Return the console page."""
    return _file("index.html")


@get("/console/{name:str}", guards=[open_guard], include_in_schema=False)
async def show_part(name: FromPath[str]) -> Response[bytes]:
    """Return one of the page's parts."""
    if name not in MEDIA_TYPES:
        raise NotFound("The console has no such part.", code="unknown_url")
    return _file(name)


def _file(name: str) -> Response[bytes]:
    return Response(_content(name), media_type=MEDIA_TYPES[name], headers=HEADERS)


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
