# tollgate.yaml: what it may say, and what is said about each thing it may not.

from __future__ import annotations

import sys
import textwrap
from ipaddress import ip_network
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import gpu_backend.demo_model
from billing.core.money import to_nano
from billing.core.prices import Price, PriceStep
from gateway.config.file import ConfigFaults, Fault, load_settings
from gateway.config.tree import Scalar, read_tree
from gateway.core.settings import (
    CacheSettings,
    HedgeSettings,
    HostedTools,
    Prefill,
    Settings,
    SignIn,
    TokenIssuer,
    Tracing,
)
from router.catalog.catalog import AutoRoute, Canary, ShadowTraffic
from router.catalog.targets import Capability, Endpoint, Tier
from router.prompt_size.token_counts import ENCODINGS

ENV = {
    "DATABASE_URL": "postgresql://house:pass@db/tollgate",
    "REDIS_URL": "redis://cache:6379/0",
    "TOLLGATE_ADMIN_KEY": "tgadmin-canary-of-the-admins",
    "TOLLGATE_KEY_PEPPER": "pepper: [canary] #1 and more",
    "OPENAI_API_KEY": "sk-canary",
    "ANTHROPIC_API_KEY": "sk-ant-canary",
    "ENGINE_SECRET": "engine-canary",
}
HEAD = """\
    database_url: ${DATABASE_URL}
    redis_url: ${REDIS_URL}
    admin_keys: [${TOLLGATE_ADMIN_KEY}]
    key_pepper: ${TOLLGATE_KEY_PEPPER}
    providers:
      openai: {format: openai, api_keys: [${OPENAI_API_KEY}], endpoints: [{region: us, base_url: https://api.openai.com/v1}]}
      own: {format: openai, self_hosted: true, endpoints: [{region: local, base_url: "http://gpu-0:8100/v1"}]}
    models:
      gpt-4o: {provider: openai}
      llama: {provider: own, price: {input: 0.40, output: 0.80}}
"""
DEMO_TOKENIZER = str(Path(gpu_backend.demo_model.__file__).parent / "checkpoint" / "tokenizer.json")
KINDS = ("input", "output", "cached_input", "cache_write", "cache_write_1h", "reasoning")
PROVIDER = 'issuer: https://login.test/x, client_id: tollgate, public_url: "https://gate.test"'
BELOW_HEAD = 11  # the line on which a test's own lines begin


def load(folder: Path, text: str, env: dict[str, str] = ENV) -> Settings:
    file = folder / "tollgate.yaml"
    file.write_text(textwrap.dedent(text))
    return load_settings(file, env)


def faults_of(folder: Path, text: str, env: dict[str, str] = ENV) -> tuple[Fault, ...]:
    with pytest.raises(ConfigFaults) as refusal:
        load(folder, text, env)
    return refusal.value.faults


def test_smallest_file_takes_the_defaults(tmp_path: Path) -> None:
    """What the file leaves out is as docs/configuration.md says; prices come from the library where it knows them."""
    settings = load(tmp_path, HEAD)

    assert settings.database_url == "postgresql://house:pass@db/tollgate"
    assert settings.admin_keys == ("tgadmin-canary-of-the-admins",)
    assert settings.key_pepper == "pepper: [canary] #1 and more"
    assert settings.data_dir == Path("/var/lib/tollgate")
    assert settings.models["gpt-4o"].price == Price(
        input=to_nano("2.5"), output=to_nano(10), cached_input=to_nano("1.25"), web_search=to_nano("0.01")
    )
    assert settings.models["gpt-4o"].context == 128_000
    assert settings.models["llama"].capabilities == {
        Capability.CHAT,
        Capability.COMPLETIONS,
        Capability.JSON,
        Capability.LOGPROBS,
    }
    assert [settings.models[name].follows_engine for name in ("llama", "gpt-4o")] == [True, False]
    assert (settings.drain, settings.queue.wait, settings.journal_fsync) == (60.0, 10.0, "never")


@pytest.mark.parametrize(
    ("upstream", "most", "usual"),
    [
        ("claude-sonnet-4-5-20250929", 64_000, 16_384),
        ("claude-opus-5-5", 128_000, 16_384),
        ("claude-3-haiku-20240307", 4_096, 4_096),
        ("gpt-4o", 16_384, 16_384),
        ("gpt-4.1-mini", 32_768, 16_384),
        ("gpt-5", 128_000, 16_384),
        ("o3", 100_000, 16_384),
    ],
)
def test_a_well_known_models_longest_answer_is_known(tmp_path: Path, upstream: str, most: int, usual: int) -> None:
    """A caller may ask for all of it; one that names no limit is sent, and held, with less."""
    models = f"models: {{known: {{provider: openai, upstream_model: {upstream}}}}}"
    model = load(tmp_path, HEAD[: HEAD.index("models:")] + models).models["known"]

    assert (model.max_output, model.usual_output) == (most, usual)


@pytest.mark.parametrize(
    ("model", "counted_by"),
    [
        ("provider: openai, upstream_model: gpt-4o-2024-11-20", "o200k_base"),
        ("provider: openai, upstream_model: openai/gpt-4-turbo", "cl100k_base"),
        ("provider: openai, upstream_model: another", None),
        ("provider: openai, upstream_model: anthropic/claude-opus-4.7", "claude-4-7"),
        ("provider: openai, upstream_model: claude-sonnet-4-5-20250929", None),
        ("provider: own, upstream_model: gpt-4o", "bytes"),
        (f"provider: own, tokenizer: {DEMO_TOKENIZER}", DEMO_TOKENIZER),
        ("provider: openai, upstream_model: gpt-4o, tokenizer: bytes", "bytes"),
    ],
)
def test_what_counts_a_models_prompts(tmp_path: Path, model: str, counted_by: str | None) -> None:
    """What the file says; else the encoding of one of OpenAI's models, bytes for ours, a bound for all others."""
    if counted_by in ENCODINGS:
        pytest.importorskip("rs_bpe")
    models = f"models: {{known: {{{model}, price: {{input: 1, output: 1}}}}}}"

    assert load(tmp_path, HEAD[: HEAD.index("models:")] + models).models["known"].tokenizer == counted_by


def test_replicas_of_our_own_are_given_up_sooner_where_another_can_go_on(tmp_path: Path) -> None:
    """Unless the file says otherwise; what else it says of timeouts changes nothing about that."""
    two = "[{region: a, base_url: 'http://gpu-0/v1'}, {region: b, base_url: 'http://gpu-1/v1'}]"
    said = {"two": "", "slow": "timeouts: {between_tokens: 20s}, ", "late": "timeouts: {first_token: 60s}, "}
    providers = [
        f"      {name}: {{format: openai, self_hosted: true, {more}endpoints: {two}}}" for name, more in said.items()
    ]
    one = "      one: {format: openai, self_hosted: true, endpoints: [{region: a, base_url: 'http://gpu-0/v1'}]}"
    settings = load(tmp_path, HEAD.replace("providers:\n", "providers:\n" + "\n".join([*providers, one]) + "\n"))

    waits = {name: provider.timeouts.between_tokens for name, provider in settings.providers.items()}
    assert [waits[name] for name in ("two", "slow", "late", "one")] == [5.0, 20.0, 5.0, 30.0]
    assert settings.providers["late"].timeouts.first_token == 60.0


def test_everything_can_be_said(tmp_path: Path) -> None:
    """Each section of the file lands where Settings keeps it, durations as seconds and dollars as nano-dollars."""
    settings = load(
        tmp_path,
        """\
        database_url: postgres://house@db/tollgate
        redis_url: rediss://cache
        data_dir: books
        admin_keys: [one-4c1f09a27be85d63, two-4c1f09a27be85d63]
        key_pepper: "01230456078901324567"
        providers:
          openai:
            format: openai
            api_keys: [a, b]
            endpoints: [{region: us, base_url: "https://us.api.openai.com/v1/"}, {region: eu, base_url: "https://eu.api.openai.com/v1"}]
            timeouts: {connect: 500ms, first_token: 1m30s, between_tokens: 5s, total: 1h}
            retries: {attempts: 3, budget: 0.5}
            breaker: {window: 1m, min_requests: 5, failure_ratio: 0.25, open_for: 30s, probes: 1}
            allow_fields: [verbosity]
            parallel_n: true
            responses: native
            hosted_tools: {web_search: false, file_search: {"*": [vs_1]}, code_interpreter: true,
                image_generation: gpt-image-2, mcp: [mcp.example.com]}
          own: {format: openai, self_hosted: true, reserved: {team_a: 0.75, b: 0.25},
                prefill: {provider: prompts, tokens: 512, share: 0.5},
                endpoints: [{region: local, base_url: "http://gpu-0:8100/v1"}]}
          prompts: {format: openai, self_hosted: true, endpoints: [{region: local, base_url: "http://gpu-1:8100/v1"}]}
        models:
          gpt-4o:
            provider: openai
            upstream_model: gpt-4o-2024-08-06
            price:
              input: 2.50
              cached_input: 1.25
              cache_write: 3
              cache_write_1h: 4
              output: 10.00
              reasoning: 12
              request: 0.01
              file_search: 0.0025
              code_interpreter: 0.03
              tiers:
                - {above: 200, input: 5, cached_input: 2.5, cache_write: 6, cache_write_1h: 8, output: 15,
                   reasoning: 18}
                - {above: 500, input: 1, cached_input: 1, cache_write: 1, cache_write_1h: 1, output: 1, reasoning: 1}
            context: 1000
            max_output: 100
            default_output: 50
            abilities: [chat, vision]
            tiers: [batch]
            weight: 2
            batch_discount: 0.5
            note: an example
          llama: {provider: own, price: {input: 0.4, output: 0.8}, gpu_hour: 3.50, batch_discount: 0.25}
        routes:
          auto:
            {small: [llama], large: [gpt-4], quality: 0.5, held_back: {share: 0.02, explore: true,
                usd_per_day: 1.50, judge: gpt-4, recalibrate: [team_a]}}
        fallbacks: {gpt-4: [llama]}
        aliases: {gpt-4: gpt-4o}
        hedge: {gpt-4: {after: p95}, llama: {after: 800ms}}
        canaries: {gpt-4: {model: llama, share: 0.05, errors: 0.1, slower: 3, dearer: 4, least: 7, window: 1m}}
        safety: {input: block, output: off}
        quotas: {standalone_share: 0.1}
        queue: {per_team: 3, wait: 1s}
        callbacks: {allow: [10.20.0.0/16, "fd00::/8"]}
        journal: {fsync: always}
        retention: {usage: 30d, batch_files: 1d, idempotency: 1h}
        cache: {models: {auto: on, gpt-4: all}, ttl: 2m, max_bytes: 1000, max_answer_bytes: 10, shared: [team_a]}
        drain: 0s
        trusted_proxies: [10.0.0.0/8, "fd00::/8"]
        connections: {per_address: 0}
        cors: {origins: [https://app.example.com, "http://localhost:3000"]}
        sign_in: {issuer: "https://login.example.com/x", client_id: tollgate, client_secret: c, public_url: "https://llm.example.com",
                  roles: {b: viewer, a: admin}, team_admins: {leads: team_a}, session: 1h, name: Example, claim: roles}
        jwt_auth: [{issuer: "https://login.example.com/x", audience: api, teams: {services: team_a}, leeway: 1m}]
        """,
    )
    provider, model = settings.providers["openai"], settings.models["gpt-4o"]

    assert settings.database_url == "postgresql://house@db/tollgate"
    assert settings.data_dir == tmp_path / "books"
    assert (settings.admin_keys, settings.key_pepper) == (
        ("one-4c1f09a27be85d63", "two-4c1f09a27be85d63"),
        "01230456078901324567",
    )
    assert provider.endpoints[0] == Endpoint("us", "https://us.api.openai.com/v1")
    assert (provider.timeouts.connect, provider.timeouts.first_token, provider.timeouts.total) == (0.5, 90.0, 3600.0)
    assert (provider.retries.attempts, provider.breaker.failure_ratio) == (3, 0.25)
    assert provider.allow_fields == {"verbosity"} and provider.parallel_n and provider.responses
    assert provider.hosted_tools == HostedTools(
        web_search=False,
        file_search={"*": ("vs_1",)},
        code_interpreter=True,
        image_generation="gpt-image-2",
        mcp=("mcp.example.com",),
    )
    assert settings.providers["own"].reserved == {"team_a": 0.75, "b": 0.25}
    assert settings.providers["own"].prefill == Prefill(provider="prompts", tokens=512, share=0.5)
    assert model.price == Price(
        input=to_nano("2.5"),
        output=to_nano(10),
        cached_input=to_nano("1.25"),
        cache_write=to_nano(3),
        cache_write_1h=to_nano(4),
        reasoning=to_nano(12),
        request=to_nano("0.01"),
        file_search=to_nano("0.0025"),
        code_interpreter=to_nano("0.03"),
        steps=(
            PriceStep(
                above=200,
                input=to_nano(5),
                output=to_nano(15),
                cached_input=to_nano("2.5"),
                cache_write=to_nano(6),
                cache_write_1h=to_nano(8),
                reasoning=to_nano(18),
            ),
            PriceStep(above=500, **dict.fromkeys(KINDS, to_nano(1))),
        ),
        batch_discount=1.0,  # an ordinary call, as far as its provider knows
    )
    assert settings.models["llama"].price.batch_discount == 0.25
    assert (model.upstream_model, model.context, model.weight) == ("gpt-4o-2024-08-06", 1000, 2)
    assert (model.max_output, model.usual_output) == (100, 50)
    assert (model.capabilities, model.tiers) == ({Capability.CHAT, Capability.VISION}, {Tier.BATCH})
    assert not model.follows_engine
    assert model.note == "an example"
    assert settings.models["llama"].gpu_hour_nanousd == to_nano("3.5")
    shadow = ShadowTraffic(
        share=0.02,
        explore=True,
        budget_nanousd=to_nano("1.50"),
        judge="gpt-4o",
        recalibrate=frozenset({"team_a"}),
    )
    assert settings.auto == {"auto": AutoRoute(small=("llama",), large=("gpt-4o",), quality=0.5, shadow=shadow)}
    assert (settings.fallbacks, settings.aliases) == ({"gpt-4o": ("llama",)}, {"gpt-4": "gpt-4o"})
    canary = Canary(model="llama", share=0.05, errors=0.1, slower=3.0, dearer=4.0, least=7, window=60.0)
    assert settings.canaries == settings.catalog().canaries == {"gpt-4": canary}
    assert settings.hedges == {"gpt-4": HedgeSettings(None), "llama": HedgeSettings(0.8)}
    assert (settings.safety.input, settings.safety.output) == ("block", "off")
    assert settings.callbacks_allow == (ip_network("10.20.0.0/16"), ip_network("fd00::/8"))
    assert settings.trusted_proxies == (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
    assert settings.connections_per_address == 0
    assert settings.sign_in == SignIn(
        issuer="https://login.example.com/x",
        client_id="tollgate",
        client_secret="c",
        public_url="https://llm.example.com",
        name="Example",
        claim="roles",
        roles={"b": "viewer", "a": "admin"},
        team_admins={"leads": "team_a"},
        session=3600.0,
    )
    assert list(settings.sign_in.roles) == ["b", "a"]  # the first that fits counts
    issuer = settings.sign_in.issuer
    assert settings.jwt_auth == (
        TokenIssuer(issuer=issuer, audience=("api",), teams={"services": "team_a"}, leeway=60.0),
    )
    assert settings.cors_origins == ("https://app.example.com", "http://localhost:3000")
    assert settings.cache == CacheSettings(
        models={"auto": "on", "gpt-4": "all"},
        ttl=120.0,
        max_bytes=1000,
        max_answer_bytes=10,
        shared=frozenset({"team_a"}),
    )
    assert (settings.retention.usage, settings.journal_fsync, settings.drain) == (30 * 86400.0, "always", 0.0)


FAULTS = [
    ("quues: {wait: 1s}", "quues", "unknown key; did you mean `queue`?"),
    ("queue: {wiat: 1s}", "queue.wiat", "unknown key; did you mean `wait`?"),
    ("queue: {wait: 10}", "queue.wait", "a number needs its unit: 10s?"),
    ("queue: {wait: 10 s}", "queue.wait", "such as 500ms, 2s, 10m, 24h or 400d"),
    ("queue: {wait: 0s}", "queue.wait", "above zero"),
    ("queue: {per_team: many}", "queue.per_team", "expected a whole number of at least 0, found the text 'many'"),
    ("queue: {per_team: '64'}", "queue.per_team", "expected a whole number"),
    ("queue: {per_team: -1}", "queue.per_team", "of at least 0"),
    ("queue: 10s", "queue", "expected a mapping of settings"),
    ("queue: [1]", "queue", "expected a mapping of settings, found a list"),
    ("quotas: {standalone_share: 1.5}", "quotas.standalone_share", "above 0 and at most 1"),
    ("quotas: {standalone_share: .nan}", "quotas.standalone_share", "expected a number"),
    ("hedge: {gpt-4: {after: p95}}", "hedge.gpt-4", "did you mean `gpt-4o`?"),
    ("hedge: {gpt-4o: {after: p99}}", "hedge.gpt-4o.after", "p95, or a duration"),
    ("canaries: {gpt-4: {model: llama, share: 0.1}}", "canaries.gpt-4", "did you mean `gpt-4o`?"),
    ("canaries: {gpt-4o: {model: llma, share: 0.1}}", "canaries.gpt-4o.model", "did you mean `llama`?"),
    ("canaries: {gpt-4o: {model: gpt-4o, share: 0.1}}", "canaries.gpt-4o", "a canary is another model"),
    ("canaries: {gpt-4o: {model: llama}}", "canaries.gpt-4o.share", "missing"),
    ("canaries: {gpt-4o: {model: llama, share: 5}}", "canaries.gpt-4o.share", "at most 1"),
    ("canaries: {gpt-4o: {model: llama, share: 0.5, slower: 0.5}}", "canaries.gpt-4o.slower", "of at least 1"),
    ("cache: {models: {llma: on}}", "cache.models.llma", "unknown model llma; did you mean `llama`?"),
    ("cache: {models: {llama: yes}}", "cache.models.llama", "expected one of on, all, off"),
    ("cache: {memory: 1}", "cache.memory", "known here: models, ttl, max_bytes, max_answer_bytes, shared"),
    ("safety: {input: on}", "safety.input", "expected one of block, flag, off"),
    ("safety: {levels: {hate: redact}}", "safety.levels.hate", "expected one of block, flag, off"),
    ("safety: {checker: {url: 'http://a', format: llama_guard}}", "safety.checker", "llama_guard needs a model"),
    ("safety: {deny: [\u200b]}", "safety.deny[0]", "expected a phrase, found invisible characters alone"),
    ("journal: {fsync: sometimes}", "journal.fsync", "never, interval, always"),
    ("journal: {fsink: never}", "journal.fsink", "did you mean `fsync`?"),
    ("callbacks: {allow: [10.20.1.1/16]}", "callbacks.allow[0]", "the range is 10.20.0.0/16"),
    ("callbacks: {allow: [inside]}", "callbacks.allow[0]", "a range such as 10.20.0.0/16"),
    ("callbacks: {allow: 10.0.0.0/8}", "callbacks.allow", "expected a list"),
    ("trusted_proxies: [caddy]", "trusted_proxies[0]", "a range such as 10.20.0.0/16"),
    ("connections: {per_address: -1}", "connections.per_address", "of at least 0"),
    ("cors: {origins: [app.example.com]}", "cors.origins[0]", "an origin such as https://app.example.com"),
    ("cors: {origins: [https://app.example.com/]}", "cors.origins[0]", "an origin such as"),
    ('cors: {origins: ["https://*.example.com"]}', "cors.origins[0]", "an origin such as"),
    ("cors: {origins: https://app.example.com}", "cors.origins", "expected a list"),
    ("retention: {usage: forever}", "retention.usage", "expected a duration"),
    ("drain: 1 minute", "drain", "expected a duration"),
    ("data_dir: 7", "data_dir", None),
    ("data_dir: on", "data_dir", "put it in quotes"),
    ("routes: {auto: {small: [lama], large: [gpt-4o]}}", "routes.auto.small[0]", "did you mean `llama`?"),
    ("routes: {auto: {small: [llama]}}", "routes.auto.large", "missing"),
    ("routes: {auto: {small: [], large: [gpt-4o]}}", "routes.auto.small", "at least 1"),
    ("routes: {auto: {small: [llama], large: [gpt-4o], quality: 2}}", "routes.auto.quality", "at most 1"),
    ("routes: {llama: {small: [llama], large: [gpt-4o]}}", "routes.llama", "a name of its own"),
    (
        "routes: {auto: {small: [llama], large: [gpt-4o], held_back: {share: 2, usd_per_day: 1}}}",
        "routes.auto.held_back.share",
        "at most 1",
    ),
    (
        "routes: {auto: {small: [llama], large: [gpt-4o], held_back: {share: 0.1}}}",
        "routes.auto.held_back.usd_per_day",
        "missing",
    ),
    ("fallbacks: {gpt4o: [llama]}", "fallbacks.gpt4o", "did you mean `gpt-4o`?"),
    ("fallbacks: {gpt-4o: [llma]}", "fallbacks.gpt-4o[0]", "did you mean `llama`?"),
    ("fallbacks: {gpt-4o: [gpt-4o]}", "fallbacks.gpt-4o[0]", "itself"),
    ("aliases: {gpt-4: gpt-4oo}", "aliases.gpt-4", "unknown model gpt-4oo; did you mean `gpt-4o`?"),
    ("aliases: {llama: gpt-4o}", "aliases.llama", "hide"),
    ("drain: ${DRAIN}", "drain", "the environment variable DRAIN is not set"),
    ("drain: ${file:/run/secrets/none-such}", "drain", "cannot be read"),
    ("drain: ${dr ain}", "drain", "${NAME:-default}"),
    ("drain: '${DRAIN'", "drain", "without its `}`"),
    ("${OPENAI_API_KEY}: 1", "", "variables belong in values"),
    ("drain: !!python/object/apply:os.system [true]", "drain", "YAML tags"),
    ("drain: !secret x", "drain", "YAML tags"),
    ("drain: 1s\ndrain: 2s", "drain", "duplicate key, first on line 11"),
    (f"sign_in: {{{PROVIDER}}}", "sign_in", "lets no person in"),
    (f"sign_in: {{{PROVIDER}, roles: {{a: team-admin}}}}", "sign_in.roles.a", "a team's admin stands in `team_admins`"),
    (f"sign_in: {{{PROVIDER}, roles: [admin]}}", "sign_in.roles", "{VALUE-OF-THE-CLAIM: viewer}"),
    (f"sign_in: {{{PROVIDER}, roles: {{a: admin}}, scopes: [email]}}", "sign_in", "`scopes` needs openid"),
    (f"sign_in: {{{PROVIDER}, roles: {{a: admin}}, session: 30d}}", "sign_in.session", "at most 7d"),
    (f"sign_in: {{{PROVIDER}, roles: {{a: admin}}, secret: x}}", "sign_in.secret", "did you mean `client_secret`?"),
    (f"sign_in: {{{PROVIDER.replace('https://l', 'http://l')}, roles: {{a: admin}}}}", "sign_in.issuer", "https://"),
    (
        f"sign_in: {{{PROVIDER.replace('gate.test', 'gate.test/a')}, roles: {{a: admin}}}}",
        "sign_in.public_url",
        "origin",
    ),
    (
        f"sign_in: {{{PROVIDER.replace('https://gate.test', '*')}, roles: {{a: admin}}}}",
        "sign_in.public_url",
        "one origin",
    ),
    ("sign_in: {client_id: x, public_url: https://gate.test, roles: {a: admin}}", "sign_in.issuer", "missing"),
    (f"sign_in: {{{PROVIDER}, roles: {{a: admin}}}}".replace("e.test", "e.test:443"), "sign_in.public_url", "port"),
    ("jwt_auth: [{issuer: https://login.test}]", "jwt_auth[0].audience", "missing"),
    ("jwt_auth: [{issuer: login.test, audience: a}]", "jwt_auth[0].issuer", "expected a URL such as"),
    ('jwt_auth: [{issuer: "https://[", audience: a}]', "jwt_auth[0].issuer", "expected a URL such as"),
    ("jwt_auth: [{issuer: https://login.test, audience: a, leeway: 1h}]", "jwt_auth[0].leeway", "at most 5m"),
    (
        "jwt_auth: [{issuer: https://login.test, audience: a, teams: [x]}]",
        "jwt_auth[0].teams",
        "{VALUE-OF-THE-CLAIM: TEAM}",
    ),
]


@pytest.mark.parametrize(("line", "path", "words"), FAULTS)
def test_fault_names_line_path_and_remedy(tmp_path: Path, line: str, path: str, words: str | None) -> None:
    """A fault says where it is, by line and by the path of its key, and what would be right."""
    text = textwrap.dedent(HEAD) + line + "\n"
    if words is None:
        assert load(tmp_path, text).data_dir == tmp_path / "7"  # a folder may be called 7
        return

    (fault,) = faults_of(tmp_path, text)

    assert fault.line == BELOW_HEAD + line.count("\n")
    assert fault.path == path
    assert words in fault.message


MODEL_FAULTS = [
    ("{provider: opneai, upstream_model: gpt-4o}", "provider", "did you mean `openai`?"),
    ("{upstream_model: gpt-4o}", "provider", "missing"),
    ("{provider: openai, upstream_model: mystery}", "price", "the price library does not know mystery"),
    ("{provider: own}", "price", "missing"),
    ("{provider: own, price: {input: 1}}", "price.output", "missing"),
    ("{provider: own, price: {input: 1, output: 1}, tokenizer: /no/such.json}", "tokenizer", "there is no file"),
    ("{provider: own, price: {input: 1, output: 1}, tokenizer: /etc/hostname}", "tokenizer", "no tokenizer.json"),
    ("{provider: own, price: {input: one, output: 1}}", "price.input", "expected US dollars"),
    ("{provider: own, price: {input: -1, output: 1}}", "price.input", "expected US dollars"),
    ("{provider: own, price: {input: 1, output: 1, outptu: 1}}", "price.outptu", "did you mean `output`?"),
    ("{provider: openai, upstream_model: gpt-4o, prise: {}}", "prise", "did you mean `price`?"),
    ("{provider: openai, upstream_model: gpt-4o, context: 10, max_output: 11}", "max_output", "`context`"),
    ("{provider: openai, upstream_model: gpt-4o, max_output: 9, default_output: 10}", "default_output", "`max_output`"),
    ("{provider: openai, upstream_model: gpt-4o, abilities: [chat, talk]}", "abilities[1]", "found the text 'talk'"),
    ("{provider: own, price: {input: 1, output: 1}, abilities: [chat, realtime]}", "abilities", "needs a provider"),
    (
        "{provider: openai, upstream_model: gpt-4o, price: {input: 1, output: 1, cached_audio: 1}}",
        "price.cached_audio",
        "a part of what `audio_input` costs",
    ),
    ("{provider: openai, upstream_model: gpt-4o, tiers: [slow]}", "tiers[0]", "interactive, batch"),
    ("{provider: openai, upstream_model: gpt-4o, batch_discount: 0}", "batch_discount", "above 0"),
    ("{provider: openai, upstream_model: gpt-4o, gpu_hour: 3}", "gpu_hour", "our own engine"),
    ("{provider: openai, upstream_model: text-embedding-3-small}", "price", "no price for answers"),
    ("{provider: openai, upstream_model: gpt-4o-search-preview}", "price", "searches the web"),
    ("{provider: openai, upstream_model: gemini-2.5-flash-image}", "price", "no usage tells: output_image_mtok"),
    ("{provider: openai, upstream_model: text-moderation-latest}", "price", "as free"),
    ("{provider: own, price: {input: 1, output: 0.0000000001}}", "price.output", "less than a billionth"),
    ("{provider: own, price: {input: 1, output: 1, tiers: []}}", "price.tiers", "at least 1"),
    ("{provider: own, price: {input: 1, output: 1, image: {low: one}}}", "price.image.low", "expected US dollars"),
    ("{provider: own, price: {input: 1, output: 1, image: {low: {big: 1}}}}", "price.image.low.big", "expected a size"),
    ("{provider: own, price: {input: 1, output: 1, tiers: 200000}}", "price.tiers", "expected a list of tiers"),
    (
        "{provider: own, price: {input: 1, output: 1, tiers: [{input: 2, output: 2}]}}",
        "price.tiers[0].above",
        "missing",
    ),
    (
        "{provider: own, price: {input: 1, output: 1, tiers: [{above: 1.5, input: 2, output: 2}]}}",
        "price.tiers[0].above",
        "expected a whole number",
    ),
    (
        "{provider: own, price: {input: 1, output: 1, tiers: [{above: 9, input: 2}]}}",
        "price.tiers[0].output",
        "missing",
    ),
    (
        "{provider: own, price: {input: 1, output: 1, cached_input: 1, tiers: [{above: 9, input: 2, output: 2}]}}",
        "price.tiers[0].cached_input",
        "missing",
    ),
    (
        "{provider: own, price: {input: 1, output: 1, tiers: [{above: 9, inputs: 2, input: 1, output: 2}]}}",
        "price.tiers[0].inputs",
        "did you mean `input`?",
    ),
    (
        "{provider: own, price: {input: 1, output: 1, tiers: "
        "[{above: 9, input: 2, output: 2}, {above: 9, input: 2, output: 2}]}}",
        "price.tiers",
        "9 does not come after 9",
    ),
    ("{provider: own, price: {input: 1, output: 1, reasonning: 1}}", "price.reasonning", "did you mean `reasoning`?"),
    ("{targets: openai, upstream_model: gpt-4o}", "targets", "[{provider: openai, weight: 2}, {provider: azure}]"),
    ("{provider: own, targets: [{provider: openai}]}", "provider", "each of `targets` names its provider"),
    ("{upstream_model: gpt-4o, targets: [{provider: opnai}]}", "targets[0].provider", "did you mean `openai`?"),
    ("{upstream_model: gpt-4o, targets: [{weight: 2}]}", "targets[0].provider", "missing"),
    ("{upstream_model: gpt-4o, targets: [{provider: openai, weight: -1}]}", "targets[0].weight", "of at least 0"),
    ("{upstream_model: gpt-4o, targets: [{provider: openai, weight: 0}]}", "targets", "every weight is 0"),
    ("{targets: [{provider: openai, upstream_model: gpt-4o}, {provider: own}]}", "targets[1].price", "missing"),
    (
        "{upstream_model: gpt-4o, targets: [{provider: openai}, {provider: openai}]}",
        "targets[1]",
        "openai stands here twice",
    ),
    (
        "{price: {input: 1, output: 1}, targets: [{provider: openai}, {provider: own}], wieght: 1}",
        "targets[0].wieght",
        "did you mean `weight`?",
    ),
]


def test_a_model_may_be_at_several_providers(tmp_path: Path) -> None:
    """Each place says what is its own, and has the rest of the model; its weight is its part of the model's calls."""
    settings = load(
        tmp_path,
        textwrap.dedent(HEAD)
        + """\
  both:
    weight: 5
    context: 1000
    max_output: 100
    targets:
      - {provider: openai, upstream_model: gpt-4o, weight: 3}
      - {provider: own, price: {input: 1, output: 2}, weight: 0, tiers: [batch]}
""",
    )
    one, other = settings.models["both"].everywhere

    assert [(each.name, each.provider, each.upstream_model) for each in (one, other)] == [
        ("both", "openai", "gpt-4o"), ("both", "own", "both"),
    ]  # fmt: skip
    assert [(each.weight, each.portion, each.context, each.max_output) for each in (one, other)] == [
        (5, 3, 1000, 100), (5, 0, 1000, 100),
    ]  # fmt: skip
    assert (one.tiers, other.tiers) == (frozenset(Tier), {Tier.BATCH})
    assert one.price.input == to_nano("2.5") and other.price.input == to_nano(1)
    assert other.price in settings.prices()
    assert [target.model.provider for target in settings.catalog().targets()] == ["openai", "own", "openai", "own"]


@pytest.mark.parametrize(("model", "key", "words"), MODEL_FAULTS)
def test_faulty_model_is_refused(tmp_path: Path, model: str, key: str, words: str) -> None:
    """A model needs a provider that exists and a price that the file or the library knows: never a silent zero."""
    (fault,) = faults_of(tmp_path, textwrap.dedent(HEAD) + f"  new: {model}\n")

    assert (fault.line, fault.path) == (BELOW_HEAD, f"models.new.{key}")
    assert words in fault.message


@pytest.mark.parametrize(
    ("line", "path", "words"),
    [
        ("routes: {auto: {small: [vectors], large: [gpt-4o]}}", "routes.auto.small[0]", "only embeds"),
        ("routes: {auto: {small: [llama], large: [gpt-4o, v]}}", "routes.auto.large[1]", "requests name it themselves"),
        (
            "routes: {auto: {small: [llama], large: [gpt-4o], held_back: {share: 1, usd_per_day: 1, judge: prompts}}}",
            "routes.auto.held_back.judge",
            "asked by chat, which prompts lacks",
        ),
        ("fallbacks: {gpt-4o: [llama, vectors]}", "fallbacks.gpt-4o[1]", "a model with chat"),
        ("fallbacks: {v: [llama]}", "fallbacks.v[0]", "a model with embeddings"),
        ("fallbacks: {vectors: [others]}", "fallbacks.vectors[0]", "`upstream_model` is vectors, too"),
        ("fallbacks: {llama: [nightly]}", "fallbacks.llama[0]", "nightly serves no tier that llama does: a model with"),
        ("fallbacks: {vectors: [too]}", "", None),
        ("fallbacks: {llama: [prompts], nightly: [gpt-4o]}", "", None),
        ("routes: {auto: {small: [llama], large: [both, prompts]}}", "", None),
    ],
)
def test_a_name_leads_to_nothing_that_never_serves(tmp_path: Path, line: str, path: str, words: str | None) -> None:
    """A model that is asked for what it cannot do would look like a spare until the day it is needed."""
    more = """
      vectors: {provider: own, price: {input: 1}, abilities: [embeddings]}
      too: {provider: own, upstream_model: vectors, price: {input: 1}, abilities: [embeddings]}
      others: {provider: own, price: {input: 1}, abilities: [embeddings]}
      both: {provider: own, price: {input: 1, output: 1}, abilities: [embeddings, chat]}
      prompts: {provider: own, price: {input: 1, output: 1}, abilities: [completions]}
      nightly: {provider: own, price: {input: 1, output: 1}, tiers: [batch]}
    aliases: {v: vectors}
"""
    text = HEAD + more.lstrip("\n") + f"    {line}\n"
    text = text.replace("output: 0.80}}", "output: 0.80}, tiers: [interactive]}")
    if words is None:
        load(tmp_path, text)
        return
    (fault,) = faults_of(tmp_path, text)

    assert (fault.line, fault.path) == (BELOW_HEAD + 7, path)
    assert words in fault.message


def test_a_library_price_with_steps_loads_with_them(tmp_path: Path) -> None:
    """A context beyond the step is no reason to refuse: the price says what a longer prompt costs."""
    settings = load(tmp_path, textwrap.dedent(HEAD) + "  long: {provider: openai, upstream_model: gpt-5.4}\n")
    model = settings.models["long"]

    assert model.context == 1_050_000
    assert model.price.steps == (
        PriceStep(above=272_000, input=to_nano(5), output=to_nano("22.5"), cached_input=to_nano("0.5")),
    )


def test_free_is_what_the_file_says_and_nothing_else(tmp_path: Path) -> None:
    """A model that the library lists as free costs nothing once the file has said so."""
    free = "{provider: openai, upstream_model: text-moderation-latest, price: {input: 0, output: 0}}"
    settings = load(tmp_path, textwrap.dedent(HEAD) + f"  new: {free}\n")

    assert settings.models["new"].price == Price(input=to_nano(0), output=to_nano(0))


def test_a_model_that_only_embeds_needs_no_price_of_answers(tmp_path: Path) -> None:
    """Vectors are no output tokens, nor are scores, which search units may pay for; so say the library and the file."""
    models = """\
  listed: {provider: openai, upstream_model: text-embedding-3-small, abilities: [embeddings]}
  written: {provider: own, abilities: [embeddings], price: {input: 1, tiers: [{above: 9, input: 2}]}}
  ranker: {provider: own, abilities: [rerank], price: {search_unit: 0.002}}
  painter: {provider: openai, upstream_model: gpt-image-2, abilities: [images]}
  brush: {provider: own, abilities: [images], price: {image: 0.07}}
"""
    settings = load(tmp_path, textwrap.dedent(HEAD) + models)

    assert settings.models["listed"].price == Price(input=to_nano("0.02"), output=to_nano(0))
    assert settings.models["written"].price.steps == (PriceStep(above=9, input=to_nano(2), output=to_nano(0)),)
    unit = Price(input=to_nano(0), output=to_nano(0), search_unit=to_nano("0.002"))
    assert settings.models["ranker"].price == unit
    painter = settings.models["painter"].price
    assert (painter.output, painter.image_input, painter.cached_image) == (to_nano(30), to_nano(8), to_nano(2))
    assert settings.models["brush"].price.image == to_nano("0.07")


ASKED = "format: openai, endpoints: [{region: a, base_url: 'https://a/v1'}]"
PROVIDER_FAULTS = [
    (f"{{{ASKED}, prefill: {{provider: x}}}}", "prefill", "only for our own engine"),
    (
        f"{{{ASKED}, self_hosted: true, prefill: {{provider: nowhere}}}}",
        "prefill.provider",
        "another provider of our own engine",
    ),
    (f"{{{ASKED}, self_hosted: true, prefill: {{tokens: 1}}}}", "prefill.provider", "missing"),
    (f"{{{ASKED}, reserved: {{a: 0.5}}}}", "reserved", "parts of how much? concurrency: N"),
    (f"{{{ASKED}, concurrency: 8, reserved: {{a: 0.5, b: 0.6}}}}", "reserved", "together more than the whole"),
    (f"{{{ASKED}, concurrency: 8, reserved: {{a: 0}}}}", "reserved.a", "a number above 0 and at most 1"),
    (f"{{{ASKED}, concurrency: 8, reserved: [a]}}", "reserved", "expected parts by team: {search: 0.25}"),
    ("{endpoints: [{region: us, base_url: 'http://h/v1'}]}", "format", "openai or anthropic"),
    ("{format: opneai, endpoints: [{region: us, base_url: 'http://h/v1'}]}", "format", "openai, anthropic"),
    ("{format: openai}", "endpoints", "missing"),
    ("{format: openai, endpoints: []}", "endpoints", "at least 1"),
    ("{format: openai, endpoints: [{region: us}]}", "endpoints[0].base_url", "missing"),
    (
        "{format: openai, endpoints: [{region: us, base_url: '${NONE}'}]}",
        "endpoints[0].base_url",
        "variable NONE is not set",
    ),
    ("{format: openai, endpoints: [{region: us, base_url: ftp://h}]}", "endpoints[0].base_url", "expected a URL"),
    ("{format: openai, endpoints: [{region: us, base_url: 'http://h'}]}", "endpoints[0].base_url", "add /v1"),
    ("{format: openai, endpoints: [{region: us, base_url: 'http://u:p@h/v1'}]}", "endpoints[0].base_url", "api_keys"),
    ("{format: anthropic, endpoints: [{region: us, base_url: 'http://h/v1'}]}", "endpoints[0].base_url", "drop /v1"),
    (
        "{format: openai, api_version: 2024-10-21, endpoints: [{region: us, base_url: 'http://h/openai'}]}",
        "endpoints[0].base_url",
        "ends before /openai",
    ),
    (
        "{format: anthropic, api_version: 2024-10-21, endpoints: [{region: us, base_url: 'http://h'}]}",
        "api_version",
        "only for Azure OpenAI",
    ),
    (
        "{format: openai, token_file: /no/such, endpoints: [{region: us, base_url: 'http://h/v1'}]}",
        "token_file",
        "there is no file /no/such",
    ),
    (
        "{format: openai, api_keys: [a], oauth: {token_url: 'http://t/t', client_id: a, client_secret: b},"
        " endpoints: [{region: us, base_url: 'http://h/v1'}]}",
        "oauth",
        "keep one of api_keys, oauth",
    ),
    (
        "{format: openai, oauth: {token_url: 'http://t/t', client_id: a},"
        " endpoints: [{region: us, base_url: 'http://h/v1'}]}",
        "oauth.client_secret",
        "missing",
    ),
    (
        "{format: openai, api_keys: [a, a], endpoints: [{region: us, base_url: 'http://h/v1'}]}",
        "api_keys",
        "the same secret twice",
    ),
    (
        '{format: openai, api_keys: ["sk-a\\r\\nx: y"], endpoints: [{region: us, base_url: "http://h/v1"}]}',
        "api_keys",
        "one line of printable ASCII",
    ),
    (
        "{format: openai, self_hosted: 1, endpoints: [{region: us, base_url: 'http://h/v1'}]}",
        "self_hosted",
        "true or false",
    ),
    (
        "{format: openai, self_hosted: true, responses: native, endpoints: [{region: us, base_url: 'http://h/v1'}]}",
        "responses",
        "leave it out",
    ),
    (
        "{format: anthropic, hosted_tools: {mcp: [a.example]}, endpoints: [{region: us, base_url: 'http://h'}]}",
        "hosted_tools",
        "code_interpreter alone",
    ),
    (
        "{format: openai, hosted_tools: {mcp: [a.example]}, endpoints: [{region: us, base_url: 'http://h/v1'}]}",
        "hosted_tools",
        "needs responses: native",
    ),
    (
        "{format: openai, endpoints: [{region: a, base_url: 'http://h/v1'}, {region: a, base_url: 'http://h/v1/'}]}",
        "endpoints",
        "the same endpoint twice",
    ),
]


@pytest.mark.parametrize(("provider", "key", "words"), PROVIDER_FAULTS)
def test_faulty_provider_is_refused(tmp_path: Path, provider: str, key: str, words: str) -> None:
    """A provider says how it speaks and where, with a base URL as its format has it."""
    text = textwrap.dedent(HEAD).replace("models:", f"  new: {provider}\nmodels:")

    (fault,) = faults_of(tmp_path, text)

    assert (fault.line, fault.path) == (8, f"providers.new.{key}")
    assert words in fault.message


@pytest.mark.parametrize("key", ["database_url", "redis_url", "admin_keys", "key_pepper", "providers", "models"])
def test_needed_setting_may_not_be_missing(tmp_path: Path, key: str) -> None:
    """Nothing that guards the house has a default: without an admin key or a pepper it does not start."""
    lines = textwrap.dedent(HEAD).splitlines(keepends=True)
    start = next(place for place, line in enumerate(lines) if line.startswith(key))
    end = next((place for place in range(start + 1, len(lines)) if lines[place][0] != " "), len(lines))

    faults = faults_of(tmp_path, "".join(lines[:start] + lines[end:]))

    assert key in [fault.path for fault in faults]


def test_admin_key_cannot_be_taken_for_a_teams(tmp_path: Path) -> None:
    """A key that looks like a team's would be looked up among teams, and refused."""
    (fault,) = faults_of(tmp_path, HEAD, ENV | {"TOLLGATE_ADMIN_KEY": "tg-" + "4c1f09a27be85d63" * 3})

    assert (fault.line, fault.path) == (3, "admin_keys")


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    """One look at the file finds everything, in the file's order."""
    lines = "\n".join(line for line, path, words in FAULTS if words and path and "\n" not in line)

    faults = faults_of(tmp_path, lines)

    assert len({fault.line for fault in faults}) > 10
    assert [fault.line for fault in faults] == sorted(fault.line for fault in faults)


def test_no_fault_shows_a_secret(tmp_path: Path) -> None:
    """Where a secret lands in the wrong place, the message names its variable and never its value."""
    text = """\
        database_url: ${OPENAI_API_KEY}
        redis_url: "${TOLLGATE_KEY_PEPPER}"
        admin_keys: ${TOLLGATE_ADMIN_KEY}
        key_pepper: [literal-canary]
        drain: ${OPENAI_API_KEY}
        queue: {per_team: ${OPENAI_API_KEY}, wait: "${FALLBACK:-default-canary}"}
        journal: {fsync: "x${OPENAI_API_KEY}"}
        callbacks: {allow: ["${OPENAI_API_KEY}", "${RANGE:-10.99.1.1/16}"]}
        aliases: {a: "${OPENAI_API_KEY}"}
        providers: {p: {format: "${OPENAI_API_KEY}", endpoints: [{region: a, base_url: "${OPENAI_API_KEY}"}]}}
        models:
          m: {provider: "${OPENAI_API_KEY}", price: "${OPENAI_API_KEY}", abilities: ["${OPENAI_API_KEY}"]}
          n: {upstream_model: "${OPENAI_API_KEY}"}
        """

    faults = faults_of(tmp_path, text)
    text_of_all = str(ConfigFaults(Path("tollgate.yaml"), list(faults)))

    assert len(faults) > 8
    assert "canary" not in text_of_all and "10.99." not in text_of_all
    assert "${OPENAI_API_KEY}" in text_of_all and "found the text of ${RANGE}" in text_of_all


def test_variables_are_values_and_nothing_else(tmp_path: Path) -> None:
    """A variable may hold anything, YAML's own characters too; defaults, files and a literal `${` work beside it."""
    secret = tmp_path / "secret"
    secret.write_text("from a file of secrets\n")
    env = ENV | {"TOLLGATE_ADMIN_KEY": "a, b]: {c} # d, e and f", "WAIT": "3s", "EMPTY": ""}
    text = (
        textwrap.dedent(HEAD).replace("${TOLLGATE_KEY_PEPPER}", f"${{file:{secret}}}")
        + "queue: {wait: ${WAIT}, per_team: ${NONE:-5}}\n"
        + "drain: ${EMPTY:-7s}  # and ${NOT_SET} in a comment is a comment\n"
        + 'data_dir: "/data/$${literal}/${NONE:-deep}"\n'
    )

    settings = load(tmp_path, text, env)

    assert settings.admin_keys == ("a, b]: {c} # d, e and f",)
    assert settings.key_pepper == "from a file of secrets"
    assert (settings.queue.wait, settings.queue.per_team, settings.drain) == (3.0, 5, 7.0)
    assert settings.data_dir == Path("/data/${literal}/deep")


@pytest.mark.parametrize("odd", ['"\\uE0000\\uE001"', "\ue0000\ue001", "\ue000\ue001"])
def test_signs_for_private_use_are_plain_text(odd: str) -> None:
    """Whatever stands in a file, only a variable is filled in."""
    faults: list[Fault] = []
    tree = read_tree(f"a: ${{SECRET}}\nb: {odd}", {"SECRET": "canary"}, faults)

    assert tree is not None and not faults
    assert isinstance(tree.entries["b"], Scalar) and "canary" not in tree.entries["b"].text


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"a: 1\nb: [1", 2, "not YAML"),
        (b"a: 1\n\tb: 2", 2, "a tab where YAML wants spaces"),
        (b"a:\n  b: 1\n c: 2\n  d: 3", 3, "indented otherwise than its neighbours"),
        (b"a:\n  b:one\n  c: 2", 3, "no space follows a colon before it"),
        (b"a: [${NOPE]", 1, "a variable is written ${NAME}"),
        (b"- a\n- b\n", 1, "a mapping of settings"),
        (b"\xff\xfe", 1, "not UTF-8"),
        (b"a: 1\nb: \xff", 2, "not UTF-8"),
        (b"key_pepper: *canary", 1, "quote a value that begins with `*`"),
        (b"a: \x00", 0, "a character that YAML does not allow"),
    ],
)
def test_file_that_is_no_yaml_is_refused(tmp_path: Path, content: bytes, line: int, words: str) -> None:
    """What cannot be parsed is refused with the line where the parser stopped, and never shown."""
    file = tmp_path / "tollgate.yaml"
    file.write_bytes(content)

    with pytest.raises(ConfigFaults) as refusal:
        load_settings(file, {})

    assert refusal.value.faults[0].line == line
    assert words in refusal.value.faults[0].message
    assert "canary" not in str(refusal.value)


def test_missing_file_is_a_fault_like_others(tmp_path: Path) -> None:
    """A file that is not there is refused by name."""
    with pytest.raises(ConfigFaults, match=r"none\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "none.yaml", {})


def test_aliases_of_yaml_cannot_grow_without_end(tmp_path: Path) -> None:
    """A few lines of anchors that repeat one another are refused before they fill the memory."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))

    faults = faults_of(tmp_path, bomb + "loop: &loop [*loop]\n")

    assert any("repeated too often" in fault.message for fault in faults)


@given(text=st.text(max_size=60), place=st.integers(0, 400))
@hypothesis_settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_settings_or_faults(tmp_path: Path, text: str, place: int) -> None:
    """Whatever stands in the file, the answer is settings or a list of faults, never another exception."""
    file = tmp_path / "tollgate.yaml"
    whole = textwrap.dedent(HEAD)
    file.write_text(whole[:place] + text + whole[place:], "utf-8", "surrogatepass")

    try:
        assert load_settings(file, ENV).admin_keys
    except ConfigFaults as refusal:
        assert refusal.faults


MONSTERS = {
    "endless": "9" * 5000,
    "negative": "-" + "9" * 30,
    "exponent": "1e99999",
    "lists": "[" * 3000 + "]" * 3000,
    "unclosed": "{a: " * 3000,
    "loop": "&a [*a]",
    "ages": "9" * 39 + "d",
    "hexadecimal": "0x10",
    "sexagesimal": "1:30",
}


@pytest.mark.parametrize("value", MONSTERS.values(), ids=MONSTERS.keys())
def test_monstrous_value_is_a_fault(tmp_path: Path, value: str) -> None:
    """Numbers beyond reason and nesting without end are refused like any other mistake."""
    text = textwrap.dedent(HEAD) + f"queue: {{per_team: {value}, wait: {value}}}\n"

    assert faults_of(tmp_path, text)


def test_tracing_without_the_sdk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is missing, the line that asks for traces says how to get it; where it is there, all is well."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="SKIPPED: no extra otel; run `make setup`")
    text = HEAD + "    tracing: {url: http://collector:4318, share: 0.1, metrics: true}\n"
    traced = load(tmp_path, text).tracing
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    (fault,) = faults_of(tmp_path, text)

    assert traced == Tracing(url="http://collector:4318", share=0.1, metrics=True)
    assert (fault.line, fault.path) == (BELOW_HEAD, "tracing")
    assert "pip install 'tollgate[otel]'" in fault.message


def test_merged_mappings_are_understood(tmp_path: Path) -> None:
    """YAML's anchors and `<<` share what several entries have in common; what stands beside them wins."""
    text = (
        textwrap.dedent(HEAD)
        + "  a: &common {provider: own, price: {input: 1, output: 2}}\n  b: {<<: *common, weight: 3}\n"
    )

    models = load(tmp_path, text).models

    assert (models["b"].provider, models["b"].price, models["b"].weight) == ("own", models["a"].price, 3.0)


def test_base_lies_under_the_file(tmp_path: Path) -> None:
    """`tollgate dev` joins its own provider and model to a file's, which may then leave out what the house brings."""
    base = {
        "database_url": "postgresql://house@127.0.0.1/tollgate",
        "redis_url": "redis://127.0.0.1",
        "admin_keys": ["tgadmin-local-4c1f09a27b"],
        "key_pepper": "31415926535897932384",
        "providers": {
            "demo": {
                "format": "openai",
                "self_hosted": True,
                "endpoints": [{"region": "here", "base_url": "http://h/v1"}],
            }
        },
        "models": {"demo": {"provider": "demo", "price": {"input": 0.1, "output": 0.2}}},
        "drain": "5s",
    }
    file = tmp_path / "tollgate.yaml"
    file.write_text(
        "providers: {openai: {format: openai, endpoints: [{region: us, base_url: 'https://api.openai.com/v1'}]}}\n"
        "models: {gpt-4o: {provider: openai}}\ndrain: 9s\n"
    )

    alone = load_settings(None, {}, base)
    joined = load_settings(file, {}, base)

    assert list(alone.models) == ["demo"]
    assert alone.drain == 5.0
    assert list(joined.models) == ["demo", "gpt-4o"]
    assert list(joined.providers) == ["demo", "openai"]
    assert (joined.drain, joined.key_pepper) == (9.0, "31415926535897932384")


def test_the_example_is_fine() -> None:
    """The tollgate.yaml in the repository loads with its variables set, and says which it needs without them."""
    file = Path(__file__).parents[4] / "tollgate.yaml"

    settings = load_settings(file, ENV | {"GEMINI_API_KEY": "gemini-canary"})
    with pytest.raises(ConfigFaults) as refusal:
        load_settings(file, {})

    commercial = {"gpt-4o", "gpt-4o-mini", "claude-haiku", "claude-sonnet", "claude-opus", "gemini-flash", "gemini-pro"}
    assert {*commercial, "llama-3-70b"} == set(settings.models)
    assert settings.aliases["claude-3-5-sonnet"] == "claude-sonnet"
    needed = {"DATABASE_URL", "REDIS_URL", "TOLLGATE_ADMIN_KEY", "TOLLGATE_KEY_PEPPER"}
    assert {fault.message.split()[3] for fault in refusal.value.faults if fault.path != "providers"} == needed


def test_a_deployment_of_another_name_is_priced_as_its_model(tmp_path: Path) -> None:
    """Azure's deployments have names of their owner's choice: `listed_as` tells the price library which model it is."""
    text = textwrap.dedent(HEAD).replace(
        "models:",
        """\
  azure:
    format: openai
    api_version: "2024-10-21"
    oauth: {token_url: "https://login.example/t", client_id: us, client_secret: s3, scope: all}
    endpoints: [{region: sweden, base_url: "https://ours.openai.azure.com/"}]
models:""",
        1,
    )
    settings = load(tmp_path, text + "  ours: {provider: azure, upstream_model: prod-1, listed_as: gpt-4o}\n")
    azure, model = settings.providers["azure"], settings.models["ours"]

    assert (azure.api_version, azure.endpoints[0].base_url) == ("2024-10-21", "https://ours.openai.azure.com")
    assert azure.oauth is not None and azure.oauth.client_secret == "s3"
    assert (model.upstream_model, model.context, model.price.input) == ("prod-1", 128_000, to_nano("2.5"))
    (fault,) = faults_of(tmp_path, text + "  ours: {provider: azure, upstream_model: prod-1, listed_as: nothing}\n")
    assert fault.path == "models.ours.price" and "does not know nothing" in fault.message


def test_pictures_are_priced_as_providers_do(tmp_path: Path) -> None:
    """By the piece, by quality, by size or by both; what is held is the dearest."""
    prices = {
        "0.04": (),
        "{1024x1024: 0.01, 1536x1024: 0.04}": ((None, "1024x1024", "0.01"), (None, "1536x1024", "0.04")),
        "{low: 0.01, high: {auto: 0.02, 1024x1024: 0.04}}": (
            *(("low", None, "0.01"), ("high", "auto", "0.02"), ("high", "1024x1024", "0.04")),
        ),
    }
    for said, rows in prices.items():
        brush = f"      brush: {{provider: own, abilities: [images], price: {{image: {said}}}}}\n"
        price = load(tmp_path, HEAD + brush).models["brush"].price
        assert price.image == to_nano("0.04")
        assert [(row.quality, row.size, row.price) for row in price.pictures] == [
            (quality, size, to_nano(cost)) for quality, size, cost in rows
        ]
