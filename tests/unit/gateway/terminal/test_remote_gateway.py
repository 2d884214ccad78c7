# What goes wrong on the way to a gateway is said in words that say what to do, with an exit status of its own.

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal

import pytest
import typer

from gateway.terminal import remote_gateway
from gateway.terminal.address import Address, read_url
from gateway.terminal.printing import Format, show
from gateway.terminal.remote_gateway import GatewayFault, RemoteGateway

PAGE = b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n<html>Hi</html>"
GONE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno"
MOVED = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: https://else.example/v1/models\r\ncontent-length: 0\r\n\r\n"


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """Listen, and answer whatever is asked with these bytes; None: not at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            connection, _ = listener.accept()
            held.append(connection)
            connection.recv(65536)
            if answer is not None:
                connection.sendall(answer)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        for connection in held:
            connection.close()


def fault(url: str, ask: Callable[[RemoteGateway], object] = lambda gateway: gateway.get("/v1/models")) -> GatewayFault:
    with pytest.raises(GatewayFault) as caught:
        ask(RemoteGateway(Address(url=url, team_key="tg-secret-of-the-test", source="--url")))
    assert "tg-secret" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (PAGE, 4, "not as a Tollgate gateway"),
        (GONE, 4, "not as a Tollgate gateway: is it the right URL, without a path? It answered 404."),
        (MOVED, 4, "leads on to https://else.example/v1/models"),
        (b"220 mail.example ESMTP\r\n", 4, "does not speak HTTP"),
        (b"", 4, "does not speak HTTP"),
        (PAGE[:-4], 1, "broke off"),
    ],
)
def test_what_is_no_gateway_is_told(answer: bytes, status: int, words: str) -> None:
    """Another server, a redirect (which is not followed: it would be shown the key), another protocol, a break."""
    with answering(answer) as place:
        told = fault(f"http://{place}")

    assert words in str(told) and told.status == status


def test_a_refusal_is_told_with_its_request_and_when_to_come_back() -> None:
    """The gateway's own words, its code, and the id to look the call up by."""
    body = b'{"error": {"message": "Too many.", "code": "rate_limit_exceeded"}}'
    head = b"HTTP/1.1 429 No\r\nx-request-id: r1\r\nretry-after: 7\r\ncontent-length: %d\r\n\r\n" % len(body)
    with answering(head + body) as place:
        told = fault(f"http://{place}")

    assert str(told) == "Too many. Again in 7 s. (rate_limit_exceeded request r1)" and told.status == 1


def test_a_refusal_moves_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Its words may be those of an upstream, or of what is no gateway: no control character of them is printed."""
    body = b'{"error": {"message": "No.\\u001b]0;mine\\u0007\\u009b2J", "code": null}}'
    head = b"HTTP/1.1 400 No\r\nx-request-id: r1\r\ncontent-length: %d\r\n\r\n" % len(body)
    with answering(head + body) as place, pytest.raises(typer.Exit):
        with remote_gateway.remote_gateway(f"http://{place}", "tg-secret-of-the-test") as gateway:
            gateway.get("/v1/models")
    said = capsys.readouterr().err

    assert said.startswith("No. ]0;mine") and all(each.isprintable() or each == "\n" for each in said)


def test_no_cell_of_a_csv_runs_in_a_spreadsheet(capsys: pytest.CaptureFixture[str]) -> None:
    """What callers wrote may begin as a formula does; numbers stay numbers."""
    rows = [{"user": "=HYPERLINK(1)", "cost_usd": Decimal("-0.000001"), "tags": {"a": 1}}]
    show(Format.CSV, rows, ("user", "cost_usd", "tags"), rows, "Calls")

    assert capsys.readouterr().out == "user,cost_usd,tags\n'=HYPERLINK(1),-0.000001,a=1\n"


def test_what_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such host, nothing that listens, TLS where there is none, silence: each with what to look at."""
    monkeypatch.setattr(remote_gateway, "TIMEOUT", 0.2)
    with answering(PAGE) as place:
        assert "does not speak TLS" in str(fault(f"https://{place}"))
    with answering(None) as place:
        assert "did not answer within" in str(fault(f"http://{place}"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    refused = fault(f"http://127.0.0.1:{port}")
    assert "nothing listens there (from --url)" in str(refused) and refused.status == 4
    assert "no such host" in str(fault("http://gate.invalid"))


def test_an_admin_route_is_not_asked_with_a_teams_key() -> None:
    """It is told before anything is sent."""
    told = fault("http://gate.invalid", lambda gateway: gateway.get("/admin/breakers"))

    assert "needs an admin key" in str(told) and told.status == 3


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("https://gate.example/v1/", "https://gate.example"),
        ("gate.example", "https://gate.example"),
        ("localhost:8000", "http://localhost:8000"),
        ("http://10.0.0.1:8000/tollgate", "http://10.0.0.1:8000/tollgate"),
    ],
)
def test_a_url_is_read_as_people_write_it(said: str, meant: str) -> None:
    """With the /v1 that clients want, without a scheme, with a path before it."""
    assert read_url(said) == meant
