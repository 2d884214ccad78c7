# The section `mcp`: servers of tools, and what is said about one that cannot be meant so.

from __future__ import annotations

from pathlib import Path

import pytest

from billing.core.money import to_nano
from billing.core.prices import Price
from gateway.config.file import ConfigFaults, load_settings
from gateway.core.settings import ALL_TOOLS, McpServer, McpTimeouts, Settings

FILE = """
database_url: postgresql://a:b@db/tollgate
redis_url: redis://cache:6379/0
admin_keys: [tgadmin-canary-of-the-admins]
key_pepper: "pepper: [canary] #1 and more"
providers: {vendor: {format: openai, endpoints: [{region: us, base_url: "https://api.vendor.test/v1"}]}}
models: {small: {provider: vendor, price: {input: 1, output: 2}}}
mcp: {servers: {tickets: SERVER}}
"""
TOKEN = "b4f1c6d09e7a2385"


def load(folder: Path, server: str) -> Settings:
    file = folder / "tollgate.yaml"
    file.write_text(FILE.replace("SERVER", server))
    return load_settings(file, {"TOKEN": TOKEN})


def test_a_server_is_read_with_its_prices(tmp_path: Path) -> None:
    """The prices of its tools are among those that the audit can tell."""
    said = """{url: "https://a.test/mcp", headers: {Authorization: "Bearer ${TOKEN}"}, price: 0.001,
      timeouts: {total: 9s},
      tools: {allow: [find, close], prices: {close: 0.01}}, teams: {support: "*", "*": [find]}}"""
    settings = load(tmp_path, said)

    assert settings.mcp_servers["tickets"] == McpServer(
        name="tickets",
        url="https://a.test/mcp",
        headers={"authorization": f"Bearer {TOKEN}"},
        tools=frozenset({"find", "close"}),
        teams={"support": ALL_TOOLS, "*": frozenset({"find"})},
        price=to_nano("0.001"),
        prices={"close": to_nano("0.01")},
        timeouts=McpTimeouts(total=9.0),
    )
    fees = {price.request for price in settings.prices() if isinstance(price, Price)}
    assert {to_nano("0.001"), to_nano("0.01")} <= fees


def test_tools_that_the_file_does_not_name_share_one_name(tmp_path: Path) -> None:
    """Names in the ledger and in metrics are the operator's: callers cannot make up more."""
    said = "{url: 'https://a.test', tools: {allow: '*', prices: {close: 1}}, teams: {a: [find], b: '*'}}"
    server = load(tmp_path, said).mcp_servers["tickets"]

    assert [server.label_of(tool) for tool in ("find", "close", "x" * 99)] == [
        "mcp/tickets/find",
        "mcp/tickets/close",
        "mcp/tickets/*",
    ]


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("{tools: {allow: '*'}, teams: {a: '*'}}", "tickets.url: missing"),
        ("{url: 'https://a.test/mcp', teams: {a: '*'}}", "tickets.tools.allow: missing; which tools may be called"),
        ("{url: 'https://a.test/mcp', tools: {allow: '*'}}", "tickets.teams: missing; which teams may use it"),
        ("{url: 'https://a.test/mcp', tools: {allow: '*'}, teams: [a]}", "expected tools by team"),
        ("{url: 'https://a.test/mcp', tools: {allow: [find]}, teams: {a: [fond]}}", "fond is none of tools.allow"),
        ("{url: 'https://a.test/mcp', tools: {allow: [find], prices: {b: 1}}, teams: {a: '*'}}", "b is none of"),
        ("{url: 'https://a.test/?key=b', tools: {allow: '*'}, teams: {a: '*'}}", "a credential belongs in headers"),
        (
            "{url: 'https://a.test', tools: {allow: '*'}, teams: {a: '*'}, headers: {mcp-session-id: abc}}",
            "the gateway writes this header itself",
        ),
    ],
)
def test_what_cannot_be_meant_is_told(tmp_path: Path, server: str, words: str) -> None:
    """With the path of its key and what would be right."""
    with pytest.raises(ConfigFaults) as refusal:
        load(tmp_path, server)

    assert words in str(refusal.value)
