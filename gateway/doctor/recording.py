# What a provider really answered, as a cassette: the shape in which other projects keep theirs, so that the wire tests
# read it (tests/wire/test_own_recordings.py). Nothing that is secret or names an account is in it.

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from gateway.config.presets import presets

HEADERS = ("content-type", "retry-after")  # that are kept
GONE = "REDACTED"
# What names an account where it is not asked to: keys, organisations, projects, users, addresses, what lies at AWS.
ACCOUNT = re.compile(
    r"\b(?:sk|pk|rk|gsk|xai|key|org|proj|user|acct|req_org)[-_][\w*-]{6,}|\bAIza[\w-]{20,}|\bya29\.[\w.-]+"
    r"|\barn:[\w.:/+=@*-]+|\barn%3A[\w.%+=@*-]+|(?<=projects/)[^/\s\"']+"
    r"|[\w.+-]+@[\w-]+\.[\w.-]+|\beyJ[\w-]+\.[\w-]+\.[\w-]*"
)
KNOWN_HOSTS = frozenset(urlsplit(row.base_url).hostname for row in presets().values())


class Recording:
    """The answers of one provider, kept until they are written."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted((secret for secret in secrets if secret), key=len, reverse=True)
        self._interactions: list[dict[str, Any]] = []

    def add(self, name: str, url: str, asked: bytes, status: int, headers: Mapping[str, str], answer: bytes) -> None:
        """Keep one exchange."""
        self._interactions.append(
            {
                "name": name,
                "request": {"method": "POST", "uri": self.clean(_public(url)), "body": self.clean(_text(asked))},
                "response": {
                    "status": {"code": status},
                    "headers": {key: [self.clean(headers[key])] for key in HEADERS if key in headers},
                    "body": {"string": self._clean_body(answer)},
                },
            }
        )

    def clean(self, text: str) -> str:
        """Return a text without the secrets, and without what names an account."""
        for secret in self._secrets:
            text = text.replace(secret, GONE)
        return ACCOUNT.sub(GONE, text)

    def _clean_body(self, body: bytes) -> str | bytes:
        """Return a body as text, or, where it is none (Bedrock's streams), as the bytes that it is."""
        try:
            return self.clean(body.decode())
        except UnicodeDecodeError:
            return self.clean(body.decode("latin-1")).encode("latin-1")

    def write(self, path: Path) -> None:
        """Write what was kept. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"interactions": self._interactions}, allow_unicode=True, sort_keys=False))


def _public(url: str) -> str:
    """Return a URL without the name of a host of one's own, and without a query but how events are asked for."""
    parts = urlsplit(url)
    host = parts.netloc if parts.hostname in KNOWN_HOSTS else "provider.example"
    return urlunsplit((parts.scheme, host, parts.path, "alt=sse" if "alt=sse" in parts.query else "", ""))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
