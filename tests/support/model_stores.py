# The places that models come from, on a port of this machine: the Hugging Face hub, and object storage as S3 and as
# Google Cloud Storage speak it. They serve the files of one folder, to the libraries that speak to the real ones.

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

REPO, BUCKET, PREFIX = "acme/tiny", "bucket", "models/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = ".safetensors"  # kept by the hub in its large file storage, with a digest


class ModelStores:
    """What is served, and what was asked: method and path, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.url = ""
        self.num_cut = 0  # so many more answers with a file's bytes end in the middle
        self.forged = ""  # the file that comes with other bytes than are said

    def environment(self) -> dict[str, str]:
        """Return what tells the libraries to ask here."""
        return {
            "HF_ENDPOINT": self.url,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "STORAGE_EMULATOR_HOST": self.url,
        }

    def files(self) -> list[Path]:
        """Return the files that are served."""
        return sorted(path for path in self.folder.iterdir() if path.is_file())


@contextlib.contextmanager
def model_stores(folder: Path) -> Iterator[ModelStores]:
    """Serve ``folder`` until the end of the block."""
    stores = ModelStores(folder)
    handler = type("Handler", (_Handler,), {"stores": stores})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    stores.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield stores
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stores: ModelStores

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), {name: values[0] for name, values in parse_qs(url.query).items()}
        self.stores.asked.append(f"{self.command} {path}")
        hub, google = f"/api/models/{REPO}", f"/storage/v1/b/{BUCKET}/o"
        if path == hub or path.startswith(f"{hub}/revision/"):
            self._json({"id": REPO, "sha": COMMIT, "private": False, "tags": [], "siblings": []})
        elif path.startswith(f"{hub}/tree/"):
            self._json([_hub_file(file) for file in self.stores.files()])
        elif match := re.fullmatch(f"/{REPO}/resolve/[^/]+/(.+)", path):
            if match[1].endswith(LARGE):
                self._answer(302, b"", location=f"{self.stores.url}/cdn/{quote(match[1])}")
            else:
                self._file(match[1])
        elif path.startswith("/cdn/"):
            self._file(path.removeprefix("/cdn/"))
        elif path.rstrip("/") == f"/{BUCKET}" and "prefix" in query:
            self._answer(200, _s3_list(self._below(query["prefix"]), query["prefix"]).encode(), "application/xml")
        elif path.startswith(f"/{BUCKET}/{PREFIX}/"):
            self._file(path.removeprefix(f"/{BUCKET}/{PREFIX}/"))
        elif path.rstrip("/") == google:
            self._json({"items": [_google_file(file) for file in self._below(query.get("prefix", ""))]})
        elif match := re.fullmatch(f"(?:/download)?{google}/{PREFIX}/(.+)", path):
            if query.get("alt") == "media" or path.startswith("/download"):
                self._file(match[1])
            else:
                file = self.stores.folder / match[1]
                self._json(_google_file(file)) if file.is_file() else self._answer(404, b"{}")
        else:
            self._answer(404, b'{"error": "Repository not found"}', **{"x-error-code": "RepoNotFound"})

    def _below(self, prefix: str) -> list[Path]:
        return [file for file in self.stores.files() if f"{PREFIX}/{file.name}".startswith(prefix)]

    def _file(self, name: str) -> None:
        file = self.stores.folder / name
        if not file.is_file():
            self._answer(404, b"", **{"x-error-code": "EntryNotFound"})
            return
        data = file.read_bytes()
        if name == self.stores.forged:
            data = bytes([data[0] ^ 1]) + data[1:]
        tag = hashlib.md5(data).hexdigest()
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if part is None:
            self._answer(200, data, "application/octet-stream", etag=f'"{tag}"')
            return
        start, end = int(part[1]), min(int(part[2] or len(data)) + 1, len(data))
        where = f"bytes {start}-{end - 1}/{len(data)}"
        self._answer(206, data[start:end], "application/octet-stream", etag=f'"{tag}"', **{"content-range": where})

    def _json(self, body: object) -> None:
        self._answer(200, json.dumps(body).encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("last-modified", "Sat, 21 Nov 2026 12:00:00 GMT")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.stores.num_cut and status in (200, 206) and kind == "application/octet-stream":
            self.stores.num_cut -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)


def _hub_file(file: Path) -> dict[str, object]:
    data = file.read_bytes()
    about: dict[str, object] = {"type": "file", "path": file.name, "size": len(data)}
    about["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if file.name.endswith(LARGE):
        about["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return about


def _s3_list(found: list[Path], prefix: str) -> str:
    rows = "".join(
        f"<Contents><Key>{escape(f'{PREFIX}/{file.name}')}</Key><LastModified>2026-11-21T12:00:00.000Z</LastModified>"
        f'<ETag>"{hashlib.md5(file.read_bytes()).hexdigest()}"</ETag><Size>{file.stat().st_size}</Size></Contents>'
        for file in found
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found)}</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
    )


def _google_file(file: Path) -> dict[str, object]:
    data = file.read_bytes()
    tag = hashlib.md5(data).hexdigest()
    return {
        "kind": "storage#object",
        "name": f"{PREFIX}/{file.name}",
        "bucket": BUCKET,
        "size": str(len(data)),
        "etag": tag,
        "generation": str(int(tag[:12], 16)),
        "updated": "2026-11-21T12:00:00.000Z",
        "timeCreated": "2026-11-21T12:00:00.000Z",
    }
