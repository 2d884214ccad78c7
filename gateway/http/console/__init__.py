# /console: a page for people, of ES modules without a build. It holds no secret and asks nothing of the server but
# these files; what it shows comes through the public API with the key that its reader gives it.

from __future__ import annotations

from functools import cache
from pathlib import Path

from litestar import Response, get
from litestar.params import FromPath

from gateway.accounts.guards import open_guard
from protocol.errors import NotFound

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
async def show_page() -> Response[bytes]:
    """Return the console page."""
    return _file(PAGE)


@get("/console/{name:str}", guards=[open_guard], include_in_schema=False)
async def show_part(name: FromPath[str]) -> Response[bytes]:
    """Return one of the page's parts, or the page itself at the address of a view."""
    return _file(PAGE if name in VIEWS else name)


@get("/console/{folder:str}/{name:str}", guards=[open_guard], include_in_schema=False)
async def show_part_of_folder(folder: FromPath[str], name: FromPath[str]) -> Response[bytes]:
    """Return a view's module, or a library."""
    return _file(f"{folder}/{name}")


def _file(name: str) -> Response[bytes]:
    if name not in FILES:
        raise NotFound("The console has no such part.", code="unknown_url")
    return Response(_content(name), media_type=FILES[name], headers=HEADERS)


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
