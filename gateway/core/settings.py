# Everything tollgate.yaml can say, as frozen structs. gateway/config/file.py reads the file into these.
# Durations are seconds, money nano-dollars; nothing here reads the environment.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct, field

from billing.core.money import NanoDollars
from billing.core.prices import Price, free
from protocol.errors import Unshown
from router.catalog.catalog import AutoRoute, Canary, Catalog
from router.catalog.targets import Endpoint, ModelSpec

# What a setting may be, as gateway/config/readers.py reads it.
Seconds = Annotated[float, "above zero"]
SecondsOrNone = Annotated[float, "zero or more"]
Part = Annotated[float, "0 to 1"]
Share = Annotated[float, "above 0 and at most 1"]
Count = Annotated[int, "zero or more"]
Number = Annotated[int, "one or more"]


class Timeouts(Struct, frozen=True, kw_only=True):
    connect: float = 2.0
    first_token: float = 20.0
    between_tokens: float = 30.0  # for replicas of our own engine until it says anything at all
    total: float = 600.0


class Retries(Struct, frozen=True, kw_only=True):
    attempts: int = 2
    budget: float = 0.1  # extra attempts per request over a window, all calls together


class BreakerPolicy(Struct, frozen=True, kw_only=True):
    window: Seconds = 30.0
    min_requests: Number = 10
    failure_ratio: Share = 0.5
    open_for: Seconds = 15.0
    probes: Number = 2


PRICED_TIERS = ("flex", "priority")  # of OpenAI: answers later for less, or sooner for more

Format = Literal["openai", "anthropic", "gemini", "bedrock"]  # the wire formats of upstreams/registry.py


# Fields of a request that change no meaning of it: a provider that refuses one can be asked without.
DROPPABLE = (
    *("seed", "user", "logit_bias", "presence_penalty", "frequency_penalty", "parallel_tool_calls", "metadata"),
    *("reasoning_effort", "verbosity", "safety_identifier", "prompt_cache_key"),
    "store",  # goes to few providers: files may still say it
)


class OAuthClient(Unshown, Struct, frozen=True, kw_only=True):
    """Whom to ask for bearer tokens, and as which client (RFC 6749, 4.4)."""

    token_url: str
    client_id: str
    client_secret: str
    scope: str | None = None


class GoogleAccount(Unshown, Struct, frozen=True, kw_only=True):
    """A service account of Google Cloud, which signs for the tokens that it asks for."""

    client_email: str
    private_key: str  # PEM
    token_uri: str


class AwsAccount(Struct, frozen=True):
    """Whose credentials of AWS sign requests: those of a profile, or "" for what the environment or the machine has."""

    profile: str = ""


class Egress(Unshown, Struct, frozen=True):
    """How a provider is reached."""

    proxy: str | None = None  # http://host:port, which carries connections on (CONNECT)
    ca_file: Path | None = None  # the authorities that are trusted there, in place of the system's


DIRECT = Egress()


class Prefill(Struct, frozen=True, kw_only=True):
    """By which replicas long prompts of a provider's models are computed."""

    provider: str  # another one of our own engine
    tokens: Count = 2048  # about, that are not cached where the reply is made, from which on they compute it,
    share: Part = 0.7  # and of the prompt


EVERY_TEAM = "*"


class HostedTools(Struct, frozen=True, kw_only=True):
    """Which tools of its own a provider may run for a response."""

    web_search: bool = True
    file_search: Mapping[str, tuple[str, ...]] = {}  # vector stores by the team's id, or EVERY_TEAM
    code_interpreter: bool = False
    image_generation: str | None = None  # by which model
    mcp: tuple[str, ...] = ()  # hosts of servers, and ids of connectors


class ProviderSettings(Unshown, Struct, frozen=True, kw_only=True):
    name: str
    format: Format
    api_keys: tuple[str, ...] = ()
    team_keys: Mapping[str, tuple[str, ...]] | None = None  # teams' own, by the team's id; without api_keys: no others
    oauth: OAuthClient | None = None  # in place of keys,
    google_key_file: GoogleAccount | None = None  # or these,
    token_file: Path | None = None  # or this: a token that another program keeps fresh
    aws: AwsAccount | None = None  # or these: of Bedrock, whose requests are signed
    headers: Mapping[str, str] = {}  # sent along with every call; names in lower case
    egress: Egress = DIRECT
    models: tuple[str, ...] = ()  # offered as NAME/model, beside those of the file; "*": all that have a known price
    api_version: str | None = None  # of Azure OpenAI, whose URLs then name deployments
    endpoints: tuple[Endpoint, ...]  # those that the file names, and of a pool the replicas that announced themselves
    self_hosted: bool = False
    prefill: Prefill | None = None  # None: prompts are computed where replies are made
    optional: bool = False  # left out, with its models, while it has no key
    preset: str | None = None  # the row of the catalogue that it goes by
    concurrency: int | None = None  # requests at one model of one endpoint at a time, of each process
    reserved: Mapping[str, float] = {}  # teams' parts of what each endpoint runs at once; others may borrow them
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    breaker: BreakerPolicy = BreakerPolicy()
    batch_api: bool = False  # lines of batches go through its Batch API
    parallel_n: bool = False  # takes no ``n``: several replies are asked for by as many requests at once
    responses: bool = False  # has /responses, and is asked there for what came as a response
    hosted_tools: HostedTools = HostedTools()
    allow_fields: frozenset[str] = frozenset()  # request fields unknown to us that this provider may be sent
    drop_fields: frozenset[str] = frozenset()  # fields that it refuses, and that change no meaning


class Scaling(Struct, frozen=True, kw_only=True):
    """Between which bounds, and for which promise, a pool's target moves. Times are seconds."""

    min: int = 1  # replicas that are always warm; 0: none while nothing is asked
    max: int
    ttft: Seconds = 1.0  # promised to nine calls of ten
    cold_start: Seconds = 120.0  # from a higher target to calls taken
    headroom: float = 0.1  # of the demand, above it
    down_after: Seconds = 300.0  # for which fewer must have been enough
    asleep: int = 0  # replicas beyond the target that sleep rather than end, at most


class EngineSpec(Struct, frozen=True, kw_only=True):
    """What a replica that is started is. Where any of it changes, all replicas are replaced."""

    model: str  # folder, id on a hub, or NAME@VERSION of a registry, as ``python -m gpu_backend --model`` takes it
    version: str | None = None  # a label: another one replaces replicas that are otherwise the same
    arguments: tuple[str, ...] = ()  # of ``python -m gpu_backend``, beside those that the controller gives
    environment: tuple[str, ...] = ()  # names of the controller's environment that its processes inherit, too
    gpus: int = 1  # of each replica
    warm_up: tuple[str, ...] = ("Hello.", "Count from one to twenty.")  # prompts, answered before the first call


class Rollout(Struct, frozen=True, kw_only=True):
    """How replicas are replaced. Times are seconds."""

    healthy_within: Seconds = 600.0  # from its start to calls taken
    canary: SecondsOrNone = 30.0  # for which a new one takes calls before an old one goes
    share: Part = 0.1  # of conversations, that new ones answer
    stand: SecondsOrNone = 60.0  # for which they do, before the rest is replaced
    max_error_rate: Part = 0.02  # of a new one's calls meanwhile; and by which new ones may fail more than old ones
    max_slowdown: float = 1.3  # of first tokens, beside those of old ones
    drain: SecondsOrNone = 120.0  # that its running replies get at its end


class Pool(Struct, frozen=True, kw_only=True):
    """A self-hosted provider whose replicas may announce themselves."""

    region: str = "local"  # of those that do
    role: str = "both"  # prefill: they compute prompts for others alone; decode: they make replies alone
    scaling: Scaling | None = None  # None: no target is told
    engine: EngineSpec | None = None  # None: `tollgate fleet up` starts none of it
    rollout: Rollout = Rollout()


class Fleet(Unshown, Struct, frozen=True, kw_only=True):
    """Which replicas are found, and whose announcements are believed."""

    secrets: tuple[str, ...]  # an announcement is signed with one of these
    networks: tuple[IPv4Network | IPv6Network, ...] = ()  # that announced addresses lie in; none: any
    pools: Mapping[str, Pool]  # by the name of their provider


Level = Literal["block", "flag", "off"]  # of a stage
FindingLevel = Literal["block", "redact", "flag", "off"]  # of what is found there
Redacts = Literal["input", "output", "both"]  # where finds of the level "redact" are taken out


class TeamSafety(Struct, frozen=True, kw_only=True):
    """A team's own levels. ``None``: the deployment's; ``levels``: of a group of rules or a category."""

    input: Level | None = None
    output: Level | None = None
    levels: Mapping[str, FindingLevel] = {}
    redacts: Redacts | None = None

    def __hash__(self) -> int:
        return hash((self.input, self.output, self.redacts, *sorted(self.levels.items())))


class AbuseSettings(Struct, frozen=True, kw_only=True):
    blocks: Count = 20  # that one key may meet in a window; 0: any number
    window: Seconds = 600.0
    pause: Seconds = 60.0  # for which its calls are then refused
    pause_unusual: Seconds = 0.0  # the same for a key whose day is nothing like its past; 0: it is told of, no more


# What an outside checker speaks: OpenAI's moderation API, or chat completions with a model that answers as Llama Guard.
CheckerFormat = Literal["moderations", "llama_guard"]


class CheckerSettings(Unshown, Struct, frozen=True, kw_only=True):
    url: str
    format: CheckerFormat = "moderations"
    model: str | None = None  # its name there; a Llama Guard has one
    judges: Literal["input", "output", "both"] = "input"
    api_key: str | None = None
    deadline: Seconds = 0.5
    on_failure: Literal["allow", "block"] = "allow"


# What the sentence encoder reads: nothing, the input that a policy judges, or prompts that are routed as well.
ReaderUse = Literal["off", "safety"]


class Safety(Struct, frozen=True, kw_only=True):
    input: Level = "off"
    output: Level = "off"
    levels: Mapping[str, FindingLevel] = {}  # of a group of rules or a category, in place of the stage's
    redacts: Redacts = "input"
    deny: tuple[str, ...] = ()  # phrases that may not pass, in lower case with single spaces
    teams_may_loosen: bool = False
    abuse: AbuseSettings = AbuseSettings()
    checker: CheckerSettings | None = None
    reader: ReaderUse | None = None  # None: "safety" where its package is installed


class QuotaSettings(Struct, frozen=True, kw_only=True):
    standalone_share: Share = 0.25


class QueueSettings(Struct, frozen=True, kw_only=True):
    per_team: Count = 64
    wait: Seconds = 10.0


class Retention(Struct, frozen=True, kw_only=True):
    usage: Seconds = 400 * 86400.0
    batch_files: Seconds = 30 * 86400.0
    idempotency: Seconds = 86400.0
    responses: SecondsOrNone = 30 * 86400.0  # 0: none is stored
    contents: SecondsOrNone = 30 * 86400.0  # of calls, at the most, where a team wants them kept; 0: none are


class BatchLimits(Struct, frozen=True, kw_only=True):
    """Of each team."""

    queued_tokens: Number = 1_000_000_000
    stored_bytes: Number = 20_000_000_000


class HedgeSettings(Struct, frozen=True):
    """When calls of a name ask a second target beside a first that has not begun to answer."""

    after: float | None  # seconds; None: within which 19 of 20 of its first tokens lately came


# Which calls go by the cache: "on" are those for the likeliest answer, "all" sampled answers and tool calls too.
CacheUse = Literal["on", "all", "off"]


class CacheSettings(Struct, frozen=True, kw_only=True):
    """Answers that are given again to the same request."""

    models: Mapping[str, CacheUse] = {}  # by the name that is asked for: a model, a route or an alias
    ttl: float = 3600.0
    max_bytes: int = 256 * 1024 * 1024  # of all answers, in Redis; 0: none is kept
    max_answer_bytes: int = 256 * 1024  # of one
    shared: frozenset[str] = frozenset()  # ids of teams that get each other's answers


def some_of(names: Sequence[str]) -> str:
    """Return names as a line has room for them: all of a few, else three and how many more there are."""
    shown, more = (names, 0) if len(names) <= 5 else (names[:3], len(names) - 3)
    return ", ".join(shown) + (f" and {more} more" if more else "")


class LeftOut(Struct, frozen=True):
    """An optional provider without a key, and what went with it."""

    provider: str
    models: tuple[str, ...]
    aliases: tuple[str, ...]  # that stood for them
    routes: tuple[str, ...]  # that are shorter, or gone

    def line(self) -> str:
        """Return it in words."""
        parts = {"models": self.models, "aliases": self.aliases, "in routes": self.routes}
        gone = "; ".join(f"{kind} {some_of(names)}" for kind, names in parts.items() if names)
        return f"provider {self.provider} is left out, for none of its api_keys is set: without {gone or 'any model'}"


class SignIn(Unshown, Struct, frozen=True, kw_only=True):
    """How people sign in to the console: at an identity provider, by OpenID Connect."""

    issuer: str
    client_id: str
    client_secret: str | None = None  # None: a public client, which PKCE alone protects
    public_url: str  # where browsers find this gateway, without a path
    name: str = "your company"  # on the button
    scopes: tuple[str, ...] = ("openid", "email", "profile")
    claim: str = "groups"  # of the ID token, which tells what a person may do
    roles: Mapping[str, str] = {}  # a value of the claim: a role. The first that a person has counts
    team_admins: Mapping[str, str] = {}  # a value of the claim: the team that the person administers; after the roles
    session: float = 8 * 3600.0


class TokenIssuer(Struct, frozen=True, kw_only=True):
    """An issuer whose JWTs stand for keys of teams."""

    issuer: str
    audience: tuple[str, ...]  # a token names one of these
    jwks_url: str | None = None  # None: as the issuer's discovery document says
    claim: str = "groups"
    teams: Mapping[str, str] | None = None  # a value of the claim: a team's id; None: the value is the team's id
    leeway: float = 30.0  # by which clocks may differ


ALL_TOOLS = frozenset({"*"})


class McpTimeouts(Struct, frozen=True, kw_only=True):
    connect: Seconds = 2.0
    answer: Seconds = 60.0  # until the answer begins
    total: Seconds = 300.0


class McpServer(Unshown, Struct, frozen=True, kw_only=True):
    """A server of the Model Context Protocol, whose tools teams call through the gateway."""

    name: str
    url: str
    headers: Mapping[str, str] = {}  # sent along with every request, its credential among them; names in lower case
    egress: Egress = DIRECT
    tools: frozenset[str]  # that may be called at all; with "*" all
    teams: Mapping[str, frozenset[str]]  # a team's id, or "*" for every other: which of them it may call
    price: NanoDollars = NanoDollars(0)  # of one call of a tool,
    prices: Mapping[str, NanoDollars] = {}  # and of tools that have one of their own
    timeouts: McpTimeouts = McpTimeouts()
    breaker: BreakerPolicy = BreakerPolicy()
    max_answer_bytes: int = 4 * 1024 * 1024

    @property
    def label(self) -> str:
        """What the ledger and keys call it."""
        return f"mcp/{self.name}"

    def label_of(self, tool: str) -> str:
        """What the ledger calls a tool. Those that the file does not name share one name: a caller may make up any."""
        return f"{self.label}/{tool if tool in self.named_tools else '*'}"

    @property
    def named_tools(self) -> frozenset[str]:
        """The tools that the file names."""
        return self.tools.union(self.prices, *self.teams.values()) - ALL_TOOLS

    def price_of(self, tool: str) -> Price:
        """Return what a call of a tool costs."""
        return _price_of_call(self.prices.get(tool, self.price))


def _price_of_call(nano: NanoDollars) -> Price:
    return Price(input=NanoDollars(0), output=NanoDollars(0), request=nano)


class Tracing(Struct, frozen=True, kw_only=True):
    """Where traces of calls go, and metrics with them."""

    url: str  # of an OpenTelemetry collector, without /v1/traces or /v1/metrics
    share: Part = 1.0  # of the calls that come without a traceparent
    metrics: bool = False  # whether metrics are sent there, too


class Settings(Unshown, Struct, frozen=True, kw_only=True):
    """One gateway's, worker's or command's configuration."""

    database_url: str  # postgresql://…
    database_direct_url: str | None = None  # past the pooler that ``database_url`` is then
    redis_url: str
    data_dir: Path
    admin_keys: tuple[str, ...]
    metrics_keys: tuple[str, ...] = ()  # that open /metrics and nothing else
    sign_in: SignIn | None = None
    jwt_auth: tuple[TokenIssuer, ...] = ()
    key_pepper: str
    other_key_peppers: tuple[str, ...] = ()  # those that were, or will be
    providers: dict[str, ProviderSettings]
    fleet: Fleet | None = None
    models: dict[str, ModelSpec]
    auto: dict[str, AutoRoute] = field(default_factory=dict)  # route name, usually "auto"
    fallbacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    canaries: dict[str, Canary] = field(default_factory=dict)  # by the name that is asked for
    hedges: dict[str, HedgeSettings] = field(default_factory=dict)  # likewise
    mcp_servers: dict[str, McpServer] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    safety: Safety = Safety()
    quotas: QuotaSettings = QuotaSettings()
    queue: QueueSettings = QueueSettings()
    callbacks_allow: tuple[IPv4Network | IPv6Network, ...] = ()
    journal_fsync: Literal["never", "interval", "always"] = "never"
    batch: BatchLimits = BatchLimits()
    retention: Retention = Retention()
    responses_stored_bytes: int = 20_000_000_000  # of each team
    cache: CacheSettings = CacheSettings()
    tracing: Tracing | None = None
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    connections_per_address: int = 1024  # as many as one client of OpenAI's SDK opens, and a few; 0: any number
    cors_origins: tuple[str, ...] = ()  # of pages whose scripts may call and read the answers
    drain: float = 60.0
    keep_alive: float = 15.0  # of silence until a stream says a comment; 0: never
    lame_duck: float = 2.0  # of the drain

    def prices(self) -> list[Price]:
        """Return what calls are reckoned by."""
        models = [one for model in self.models.values() for one in model.everywhere]
        priced = [price for one in models for price in (one.price, one.batch_price, *dict(one.service_tiers).values())]
        of_models = [each for price in dict.fromkeys(priced) if price is not None for each in (price, free(price))]
        servers = self.mcp_servers.values()
        of_tools = [_price_of_call(nano) for one in servers for nano in (one.price, *one.prices.values())]
        return [*of_models, *of_tools]

    def catalog(self) -> Catalog:
        """Return what the router chooses from."""
        endpoints = {name: provider.endpoints for name, provider in self.providers.items()}
        return Catalog(self.models, endpoints, self.auto, self.fallbacks, self.aliases, self.canaries)
