# One provider of tollgate.yaml: its wire format, where it answers and how it is reached, what it is asked with, and
# with how much patience.

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from gateway.config.fields import Faults, Fields, Read, complain, kind_of, shown
from gateway.config.models import name_of
from gateway.config.offers import ALL
from gateway.config.presets import CREDENTIALS, presets
from gateway.config.readers import (
    by_name,
    duration,
    integer,
    list_of,
    number,
    one_of,
    secret,
    secrets,
    section_of,
    struct_of,
    switch,
    text,
    url,
)
from gateway.config.tree import Node, Scalar, Section
from gateway.core.settings import (
    DIRECT,
    DROPPABLE,
    AwsAccount,
    BreakerPolicy,
    Egress,
    Format,
    GoogleAccount,
    HostedTools,
    OAuthClient,
    Prefill,
    ProviderSettings,
    Retries,
    Timeouts,
)
from protocol.serving.prompt_marks import PROMPT_MARKS
from router.catalog.targets import Endpoint

# Hosts of Batch APIs that give a discount: lines go there unless the file says otherwise.
BATCH_API_HOSTS = frozenset({"api.openai.com", "api.anthropic.com", "generativelanguage.googleapis.com"})
AT_VERTEX = ("/publishers/google", "/publishers/anthropic")
WITHOUT_N = ("anthropic", "gemini", "bedrock")  # formats of APIs that give one reply at a time
REPLICA_SILENT = 5.0  # seconds
HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,99}")
OWN_HEADERS = frozenset(
    {"host", "connection", "content-type", "content-length", "transfer-encoding", "accept-encoding", "cookie"}
    | {"authorization", "proxy-authorization", "api-key", "x-api-key", "x-goog-api-key"}
    | {"anthropic-version", "anthropic-beta", "x-tenant", "x-weight", "x-tier", "x-fails-over", PROMPT_MARKS}
)
_TOKEN_URL = url(("https", "http"), "https://login.microsoftonline.com/TENANT/oauth2/v2.0/token")
_OAUTH = struct_of(OAuthClient, token_url=_TOKEN_URL, client_secret=secret)
_RETRIES = struct_of(Retries, attempts=integer(1, 10), budget=number(0, 10))
_TIMEOUTS = dict.fromkeys(Timeouts.__struct_fields__, duration)
_HOSTED = struct_of(
    HostedTools,
    file_search=by_name(list_of(text, what="vector stores"), "vector stores by team: {search: [vs_…]}"),
    mcp=list_of(text, what="hosts of servers, or ids of connectors"),
)

read_breaker = struct_of(BreakerPolicy)


def read_provider(node: Node, faults: Faults, *, is_pool: bool = False) -> ProviderSettings:
    """Read one provider; what is faulty stands in half-read. A pool needs no endpoints: replicas announce theirs."""
    fields = Fields(node, node.path, faults)
    formats = get_args(Format)
    right = (
        f"{' or '.join(formats)}: how it wants requests; or the name of one of the catalogue: {', '.join(presets())}"
    )
    wire: Format = fields.need("format", one_of(*formats), "openai", right)
    endpoints = _endpoints(fields, wire, is_pool=is_pool)
    nothing: tuple[str, ...] = ()
    no_parts = dict[str, float]()
    self_hosted = fields.get("self_hosted", switch, False)
    ways = [name for name in CREDENTIALS if fields.has(name)]
    takes_team_keys = not self_hosted and ways in ([], ["api_keys"]) and (wire != "bedrock" or bool(ways))
    # A replica sends a keep-alive every second; where another can go on, a silent one is soon abandoned.
    usual = Timeouts(between_tokens=REPLICA_SILENT) if self_hosted and (is_pool or len(endpoints) > 1) else Timeouts()
    provider = ProviderSettings(
        name=name_of(node),
        preset=fields.find("preset", text),
        format=wire,
        api_keys=fields.get("api_keys", secrets(0), nothing),
        team_keys=_team_keys(fields, is_possible=takes_team_keys),
        oauth=fields.find("oauth", _OAUTH),
        google_key_file=fields.find("google_key_file", _google_account),
        token_file=fields.find("token_file", _token_file),
        aws=_aws(fields, wire, ways),
        headers=fields.get("headers", headers_but(OWN_HEADERS), {}),
        egress=read_egress(fields),
        models=fields.get("models", _offered, nothing),
        api_version=fields.find("api_version", text),
        endpoints=endpoints,
        self_hosted=self_hosted,
        prefill=fields.find("prefill", struct_of(Prefill)),
        optional=fields.get("optional", switch, False),
        concurrency=fields.find("concurrency", integer(1)),
        reserved=fields.get("reserved", by_name(number(0, 1, above=True), "parts by team: {search: 0.25}"), no_parts),
        batch_api=fields.get("batch_api", switch, _has_batch_api(endpoints) and not self_hosted),
        parallel_n=fields.get("parallel_n", switch, wire in WITHOUT_N),
        responses=fields.find("responses", one_of("native", "chat")) == "native",
        hosted_tools=fields.get("hosted_tools", _HOSTED, HostedTools()),
        timeouts=fields.get("timeouts", section_of(partial(replace, usual), _TIMEOUTS), usual),
        retries=fields.get("retries", _RETRIES, Retries()),
        breaker=fields.get("breaker", read_breaker, BreakerPolicy()),
        allow_fields=frozenset(fields.get("allow_fields", list_of(text, what="field names"), nothing)),
        drop_fields=frozenset(fields.get("drop_fields", list_of(one_of(*DROPPABLE), what="field names"), nothing)),
    )
    for name, words in _contradictions(provider, ways):
        complain(fields.node(name) or node, faults, words)
    fields.close()
    return provider


def _endpoints(fields: Fields, wire: Format, *, is_pool: bool) -> tuple[Endpoint, ...]:
    """Read where a provider answers."""
    if is_pool and not fields.has("endpoints"):
        return ()
    read_url = _base_url(wire, is_azure=fields.has("api_version"))
    read = list_of(
        section_of(Endpoint, {"region": text, "base_url": read_url}, needed=("region", "base_url")),
        what="endpoints",
        least=1,
    )
    return fields.need("endpoints", read, (), "where it answers: [{region: us, base_url: https://…}]")


def _contradictions(said: ProviderSettings, ways: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a provider that do not go with others, and why. ``ways``: those by which it is asked."""
    if len(set(said.endpoints)) < len(said.endpoints):
        yield "endpoints", "the same endpoint twice"
    if said.api_version is not None and said.format != "openai":
        yield "api_version", "only for Azure OpenAI, whose format is openai"
    if len(ways) > 1:
        yield ways[-1], f"a provider is asked in one way: keep one of {', '.join(ways)}"
    if said.optional and "api_keys" not in ways:
        yield "optional", "left out while no key is set: needs api_keys: [${NAME:-}]"
    if said.batch_api and said.self_hosted:
        yield "batch_api", "our own engine computes batches itself: leave it out"
    elif said.batch_api and any(one.base_url.endswith(AT_VERTEX) for one in said.endpoints):
        yield "batch_api", "Vertex AI has no Batch API of this shape: leave it out"
    if said.responses and (said.format != "openai" or said.self_hosted or said.api_version is not None):
        right = "only for a provider of format openai that has /responses below its base URL"
        yield "responses", f"{right}; leave it out"
    if said.format == "anthropic":
        if said.hosted_tools not in (HostedTools(), HostedTools(code_interpreter=True)):
            yield "hosted_tools", "of a provider of format anthropic code_interpreter alone is to be allowed"
    elif said.hosted_tools != HostedTools() and not said.responses:
        yield "hosted_tools", "tools that a provider runs are those of its Responses API: needs responses: native"
    if sum(said.reserved.values()) > 1 + 1e-9:
        yield "reserved", "together more than the whole: parts add up to 1 at the most"
    if said.reserved and said.concurrency is None and not said.self_hosted:
        yield "reserved", "parts of how much? concurrency: N"
    if said.prefill is not None and not said.self_hosted:
        yield "prefill", "only for our own engine; leave it out, or self_hosted: true"
    if said.parallel_n and said.self_hosted:
        yield "parallel_n", "not for our own engine, which knows n"


def check_prefills(node: Node | None, providers: Mapping[str, ProviderSettings], faults: Faults) -> None:
    """Hold what computes prompts for others to being our own engine, and to doing so for no engine that has some."""
    for name, each in providers.items():
        if each.prefill is None or not each.self_hosted:
            continue
        other, at = providers.get(each.prefill.provider), node
        for key in (name, "prefill", "provider"):
            at = at.entries.get(key, at) if isinstance(at, Section) else at
        if at is not None and (other is None or not other.self_hosted or other.prefill is not None or other is each):
            complain(at, faults, "expected another provider of our own engine, which has no prefill itself")


def _team_keys(fields: Fields, *, is_possible: bool) -> dict[str, tuple[str, ...]] | None:
    """Read teams' own keys."""
    said = fields.find("team_keys", by_name(secrets(0), "keys by team: {search: [${NAME}]}"))
    if said is not None and not is_possible:
        right = "only for a provider that is asked with keys; our own engine and those asked with tokens have none"
        return complain(fields.node("team_keys"), fields.faults, f"{right}: leave it out")  # type: ignore[arg-type]
    return None if said is None else {team: keys for team, keys in said.items() if keys}


def _aws(fields: Fields, wire: str, ways: list[str]) -> AwsAccount | None:
    """Read whose credentials sign requests to Bedrock: what AWS's own tools would take, where the file says nothing."""
    said = fields.find("aws", struct_of(AwsAccount))
    if said is not None and wire != "bedrock":
        return complain(fields.node("aws"), fields.faults, "only for the format bedrock")  # type: ignore[arg-type]
    account = said or (AwsAccount() if wire == "bedrock" and not ways else None)
    if account is not None and find_spec("botocore") is None:
        at = fields.node("aws") or fields.node("format")
        return complain(at, fields.faults, "needs the package botocore: pip install 'tollgate[bedrock]'")  # type: ignore[arg-type]
    return account


def _has_batch_api(endpoints: tuple[Endpoint, ...]) -> bool:
    return bool(endpoints) and all(urlsplit(one.base_url).hostname in BATCH_API_HOSTS for one in endpoints)


def headers_but(own: Collection[str], hint: str = "; a key belongs in api_keys") -> Read[dict[str, str]]:
    """Make a reader of headers that go along with every call. Its ``own`` the gateway writes itself: those are not for
    a file to say."""

    def read(node: Node, faults: Faults) -> dict[str, str] | None:
        if not isinstance(node, Section):
            return complain(node, faults, f"expected headers by name: {{x-title: …}}; found {kind_of(node)}")
        found: dict[str, str] = {}
        for name, each in node.entries.items():
            if HEADER.fullmatch(name) is None:
                complain(each, faults, "a header's name has letters, digits and dashes alone")
            elif name.lower() in own:
                complain(each, faults, f"the gateway writes this header itself{hint}")
            elif (value := secret(each, faults)) is not None:
                if not (value.isascii() and value.isprintable()):
                    complain(each, faults, "a header's value is one line of printable ASCII")
                found[name.lower()] = value
        return found

    return read


def read_egress(fields: Fields) -> Egress:
    """Read `proxy` and `ca_file`: how a place outside is reached."""
    proxy, ca_file = fields.find("proxy", _proxy), fields.find("ca_file", _ca_file)
    return Egress(proxy, ca_file) if proxy or ca_file else DIRECT  # by which a usual request is known at a glance


def _proxy(node: Node, faults: Faults) -> str | None:
    value = url(("http",), "http://proxy:3128")(node, faults)
    if value is not None and (urlsplit(value).path.strip("/") or urlsplit(value).query or not urlsplit(value).hostname):
        return complain(node, faults, "a proxy is scheme, host and port alone: http://proxy:3128")
    return value


def _ca_file(node: Node, faults: Faults) -> Path | None:
    if (name := text(node, faults)) is None:
        return None
    try:
        ssl.create_default_context(cafile=name)
    except OSError as exc:
        why = exc.strerror or "no certificate in PEM form"
        return complain(node, faults, f"{shown(node)} holds no authorities that can be read: {why}")
    return Path(name)


def _offered(node: Node, faults: Faults) -> tuple[str, ...] | None:
    """Read which models a provider offers by itself: all, or some by name."""
    if isinstance(node, Scalar) and node.text == ALL:
        return (ALL,)
    return list_of(text, what="models", least=1)(node, faults)


def _google_account(node: Node, faults: Faults) -> GoogleAccount | None:
    """Read the key file of a service account, whose content no message shows."""
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if (name := text(node, faults)) is None:
        return None
    try:
        account = msgspec.json.decode(Path(name).read_bytes(), type=GoogleAccount)
        if isinstance(load_pem_private_key(account.private_key.encode(), None), rsa.RSAPrivateKey):
            return account
    except OSError as exc:
        return complain(node, faults, f"the file {shown(node)} cannot be read: {exc.strerror}")
    except (msgspec.DecodeError, ValueError, TypeError):
        pass
    right = "the JSON file of a service account's key, with client_email, private_key and token_uri"
    return complain(node, faults, f"{shown(node)} is no {right}")


def _token_file(node: Node, faults: Faults) -> Path | None:
    name = text(node, faults)
    if name is not None and not Path(name).is_file():
        return complain(node, faults, f"there is no file {shown(node)}; a token must lie there, and be renewed there")
    return None if name is None else Path(name)


def _base_url(wire: str, *, is_azure: bool) -> Read[str]:
    """Make a reader of a base URL as ``wire`` has it: with the version for OpenAI and Gemini, without for Anthropic and
    Azure."""
    read_url = url(("http", "https"), "https://api.openai.com/v1")

    def read(node: Node, faults: Faults) -> str | None:
        value = read_url(node, faults)
        if value is None:
            return None
        parts = urlsplit(value)
        path = parts.path.rstrip("/")
        if parts.username or parts.password or parts.query or parts.fragment or not parts.hostname:
            return complain(node, faults, "a base URL is scheme, host, port and path alone; keys belong in api_keys")
        if is_azure:
            if path.endswith(("/openai", "/v1")) or "/deployments" in path:
                right = "the base URL beside an api_version ends before /openai; without one, it ends in /openai/v1"
                return complain(node, faults, right)
            return value.rstrip("/")
        if wire == "openai" and not path:
            return complain(node, faults, "the base URL of the OpenAI format ends in its version: add /v1")
        if wire == "gemini" and not path:
            return complain(node, faults, "the base URL of the Gemini format ends in its version: add /v1beta")
        if wire == "bedrock" and path:
            right = "the base URL of Bedrock is its runtime's: https://bedrock-runtime.us-east-1.amazonaws.com"
            return complain(node, faults, right)
        if wire == "anthropic" and path.endswith("/v1"):
            return complain(node, faults, "the base URL of the Anthropic format ends before the version: drop /v1")
        return value.rstrip("/")

    return read
