# An identity provider by the book: it publishes what real ones do, and signs whatever a test asks for, wrong things
# too. Its ``ask`` stands where the gateway's HTTP client would; ``listening`` puts it on a port.

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from gateway.core.settings import SignIn
from gateway.identity.issuer import IssuerAway

ISSUER = "https://login.test/realm"
CLIENT, SECRET = "tollgate", "the secret of the client"
SIGN_IN = SignIn(
    issuer=ISSUER,
    client_id=CLIENT,
    client_secret=SECRET,
    public_url="https://gateway.test",
    roles={"admins": "admin", "controllers": "finance"},
    team_admins={"leads of a": "team_a"},
)


class IdentityProvider:
    """One issuer with its keys. ``asked`` lists the URLs that were asked for."""

    def __init__(self, issuer: str = ISSUER) -> None:
        self.issuer = issuer
        self.asked: list[str] = []
        self.forms: list[dict[str, str]] = []
        self.headers: list[Mapping[str, str]] = []
        self.keys: dict[str, Any] = {}
        self.metadata: dict[str, Any] = {
            "issuer": issuer,
            "jwks_uri": issuer + "/keys",
            "authorization_endpoint": issuer + "/authorize",
            "token_endpoint": issuer + "/token",
        }
        self.is_away = False
        self.hangs: asyncio.Event | None = None  # until it is set, nothing is answered
        self.told: tuple[int, Any] = (200, {})  # by the token endpoint
        self.rotate("first")

    def rotate(self, key_id: str, key: Any = None) -> None:
        """Sign with another key from now on, which is published."""
        self.current = key_id
        self.keys[key_id] = ec.generate_private_key(ec.SECP256R1()) if key is None else key

    def token(
        self, *, key: Any = None, alg: str = "ES256", headers: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a signed token; a claim that is ``None`` is left out."""
        import jwt

        now = time.time()
        said = {"iss": self.issuer, "aud": CLIENT, "sub": "ada", "iat": now, "exp": now + 300, **claims}
        said = {name: value for name, value in said.items() if value is not None}
        head = {"kid": self.current} if headers is None else headers
        return jwt.encode(said, self.keys[self.current] if key is None else key, alg, headers=head)

    def document(self) -> dict[str, Any]:
        """Return the keys as they are published."""
        return {"keys": [{**_public(key), "kid": key_id, "use": "sig"} for key_id, key in self.keys.items()]}

    async def ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Answer as the network would."""
        self.asked.append(url)
        if self.hangs is not None:
            await self.hangs.wait()
        if self.is_away:
            raise IssuerAway("it does not answer")
        match method, urlsplit(url).path.rpartition("/")[2]:
            case "GET", "openid-configuration":
                return 200, msgspec.json.encode(self.metadata)
            case "GET", "keys":
                return 200, msgspec.json.encode(self.document())
            case "POST", "token":
                self.forms.append(dict(parse_qsl(body.decode())))
                self.headers.append(headers)
                return self.told[0], msgspec.json.encode(self.told[1])
        return 404, b"{}"


@contextmanager
def listening() -> Iterator[IdentityProvider]:
    """Run a provider on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = asyncio.run(provider.ask("GET", self.path, {}, b""))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider = IdentityProvider(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield provider
        server.shutdown()
        thread.join()


def _public(key: Any) -> dict[str, Any]:
    from jwt.algorithms import ECAlgorithm, RSAAlgorithm

    algorithm = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    found: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return found
