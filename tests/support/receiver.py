# A receiver of callbacks that misbehaves as it is told: a real server on loopback, plain or with a certificate of its
# own, that keeps what it was sent.

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

OK = b"HTTP/1.1 204 No Content\r\n\r\n"
HANG = b"hang"  # take the request and say nothing
RESET = b"reset"  # close instead of answering
DRIP = b"drip"  # an answer whose headers never end
ENDLESS = b"endless"  # 200, and a body without end
SLOW_BODY = b"slow body"  # 200, and a body that never comes


def answer(status: int, *headers: str, body: bytes = b"") -> bytes:
    """Return an answer."""
    lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@dataclass
class Delivery:
    """One request, as it came."""

    line: str
    headers: dict[str, str]
    body: bytes
    server_name: str | None = None  # what TLS was told


@dataclass
class Receiver:
    """Where it listens, what it is to do, and what it was sent."""

    port: int = 0
    scheme: str = "http"
    acts: list[bytes] = field(default_factory=lambda: [OK])  # in turn; the last one for ever
    act_of: Callable[[Delivery], bytes] | None = None  # decides instead of ``acts``
    deliveries: list[Delivery] = field(default_factory=list)
    connections: int = 0
    sent: int = 0  # bytes of endless bodies
    running: int = 0
    most_running: int = 0

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        """Return a URL that leads here."""
        return f"{self.scheme}://{host}:{self.port}{path}"

    def paths(self) -> list[str]:
        """Return the paths that were asked for, in order."""
        return [each.line.split(" ")[1] for each in self.deliveries]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request and do what is to be done."""
        self.connections += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._act(await self._read(reader, writer), reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.running -= 1
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Delivery:
        line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        tls = writer.get_extra_info("ssl_object")
        delivery = Delivery(line, headers, body, getattr(tls, "asked_for", None))
        self.deliveries.append(delivery)
        return delivery

    async def _act(self, delivery: Delivery, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        act = self.act_of(delivery) if self.act_of else self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
        match act:
            case b"hang":
                await reader.read()  # until the other side leaves
            case b"reset":
                writer.transport.abort()
            case b"drip":
                writer.write(b"HTTP/1.1 200 OK\r\n")
                while True:
                    writer.write(b"x-more: 1\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)
            case b"endless":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(bytes(65536))
                    await writer.drain()
                    self.sent += 65536
            case b"slow body":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
                await reader.read()  # until the other side leaves
            case _:
                writer.write(act)
                await writer.drain()


@asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """Run a receiver on a free port of 127.0.0.1, over TLS if a context is given."""
    receiver = Receiver(scheme="https" if tls else "http")
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(receiver.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def certificate_for(name: str, folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Make a certificate for a host name; return the server's context, and a client's that trusts this one alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / f"{name}.pem"
    path.write_bytes(private + certificate.public_bytes(encoding))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)

    def remember(connection: ssl.SSLObject, asked_for: str | None, _: ssl.SSLContext) -> None:
        connection.asked_for = asked_for  # type: ignore[attr-defined]

    server.sni_callback = remember  # type: ignore[assignment]
    client = ssl.create_default_context(cadata=certificate.public_bytes(encoding).decode())
    return server, client
