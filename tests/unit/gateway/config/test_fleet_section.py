# The section `fleet`: pools, and what is said about one that cannot work.

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path

import pytest

from gateway.config.file import ConfigFaults, load_settings
from gateway.core.settings import EngineSpec, Fleet, Pool, Rollout, Scaling, Settings

SECRET, ENGINE_SECRET = "b4f1c6d09e7a2385", "0c9d7e6f5a4b3c2d"
FILE = """
database_url: postgresql://a:b@db/tollgate
redis_url: redis://cache:6379/0
admin_keys: [tgadmin-canary-of-the-admins]
key_pepper: "pepper: [canary] #1 and more"
providers:
  own: {format: openai, self_hosted: true, api_keys: [${ENGINE_SECRET}]}
  vendor: {format: openai, endpoints: [{region: us, base_url: "https://api.vendor.test/v1"}]}
models:
  llama: {provider: own, price: {input: 0.40, output: 0.80}}
fleet: FLEET
"""


def load(folder: Path, fleet: str, more: str = "") -> Settings:
    """Read a file with this section, and ``more`` behind it."""
    file = folder / "tollgate.yaml"
    file.write_text(FILE.replace("FLEET", fleet) + more)
    return load_settings(file, {"FLEET_SECRET": SECRET * 2, "ENGINE_SECRET": ENGINE_SECRET * 2})


def test_a_pool_needs_no_endpoints(tmp_path: Path) -> None:
    """Its provider goes on at another replica of a silent one, as with several endpoints."""
    pools = "{own: {region: here, scaling: {max: 4, ttft: 500ms}}}"
    networks = "secrets: ['${FLEET_SECRET}'], networks: [10.20.0.0/16]"
    settings = load(tmp_path, f"{{{networks}, pools: {pools}}}")
    pool = Pool(region="here", scaling=Scaling(min=1, max=4, ttft=0.5))
    assert settings.fleet == Fleet(secrets=(SECRET * 2,), networks=(ip_network("10.20.0.0/16"),), pools={"own": pool})
    own = settings.providers["own"]
    assert (own.endpoints, own.timeouts.between_tokens) == ((), 5.0)


PROMPTS = """
providers:
  own: {format: openai, self_hosted: true, api_keys: ["${ENGINE_SECRET}"], prefill: {provider: ASKED}}
  prompts: {format: openai, self_hosted: true, api_keys: ["${ENGINE_SECRET}"]}
  others: {format: openai, self_hosted: true, api_keys: ["${ENGINE_SECRET}"]}
"""


def test_a_pool_has_a_role(tmp_path: Path) -> None:
    """Its engines are told, and what contradicts it is refused: models that name it, no pool that asks, no address."""

    def of(prompts: str, own: str = "", asked: str = "prompts") -> Settings:
        pool = "scaling: {max: 1}, engine: {model: m, arguments: [--kv-transfer-address, '10.0.0.5:0']}"
        pools = f"{{own: {{{pool}{own}}}, prompts: {{{prompts}}}, others: {{}}}}"
        file = FILE.replace(
            FILE[FILE.index("providers:") : FILE.index("models:")], PROMPTS.lstrip().replace("ASKED", asked)
        )
        place = tmp_path / "tollgate.yaml"
        place.write_text(file.replace("FLEET", f"{{secrets: ['${{FLEET_SECRET}}'], pools: {pools}}}"))
        return load_settings(place, {"FLEET_SECRET": SECRET * 2, "ENGINE_SECRET": ENGINE_SECRET * 2})

    engine = "scaling: {max: 1}, engine: {model: m, arguments: [--kv-transfer-address=10.0.0.5:0]}, role: prefill"
    fleet = of(engine, ", role: decode").fleet
    assert fleet is not None
    told = {name: pool.engine.arguments for name, pool in fleet.pools.items() if pool.engine is not None}

    assert told == {
        "own": ("--kv-transfer-address", "10.0.0.5:0", "--role", "decode"),
        "prompts": ("--kv-transfer-address=10.0.0.5:0", "--role", "prefill"),
    }
    for prompts, own, asked, why in (
        ("role: prefill", ", role: prefill", "prompts", "models name own as their provider"),
        ("role: prefill", "", "others", "nothing is asked of it"),
        ("role: draft", "", "prompts", "expected both, prefill, decode"),
        ("role: prefill, scaling: {max: 1}, engine: {model: m}", "", "prompts", "role: prefill exchanges blocks"),
        ("scaling: {max: 1}, engine: {model: m, arguments: [--role, prefill]}", "", "prompts", "the pool's role"),
    ):
        with pytest.raises(ConfigFaults, match=why):
            of(prompts, own, asked)


def test_a_pool_says_what_its_replicas_are(tmp_path: Path) -> None:
    """A path or an id, words of a command line, prompts; and how they are replaced."""
    engine = (
        "engine: {model: /models/llama, version: b, arguments: [--max-model-len, 8192], environment: [AWS_*, TOKEN], "
        "gpus: 2, warm_up: [Hi.]}"
    )
    pools = f"{{own: {{scaling: {{max: 4}}, {engine}, rollout: {{canary: 0s, drain: 1m}}}}}}"
    settings = load(tmp_path, f"{{secrets: ['${{FLEET_SECRET}}'], pools: {pools}}}")
    assert settings.fleet is not None
    pool = settings.fleet.pools["own"]

    assert pool.engine == EngineSpec(
        model="/models/llama",
        version="b",
        arguments=("--max-model-len", "8192"),
        environment=("AWS_*", "TOKEN"),
        gpus=2,
        warm_up=("Hi.",),
    )
    assert pool.rollout == Rollout(canary=0.0, drain=60.0)


def test_the_secret_of_announcements_is_sent_nowhere(tmp_path: Path) -> None:
    """A provider's key goes to its endpoints: who hears it could announce an address."""
    with pytest.raises(ConfigFaults) as refusal:
        load(tmp_path, "{secrets: ['${ENGINE_SECRET}'], pools: {own: }}")

    assert "fleet.secrets: also an api_key of a provider" in str(refusal.value)
    assert ENGINE_SECRET not in str(refusal.value)


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        ("{pools: {own: {scaling: {min: 1}}}}", "fleet.pools.own.scaling.max: missing"),
        ("{pools: {own: {scaling: {min: 3, max: 2}}}}", "fleet.pools.own.scaling: min is 3 and max is 2"),
        ("{pools: {own: }}", "fleet.secrets: missing; what announcements of replicas are signed with"),
        ("{secrets: [], pools: {own: }}", "fleet.secrets: expected at least 1"),
        ("{secrets: [short], pools: {own: }}", "fleet.secrets[0]: a secret of 5 characters can be guessed"),
        ("{secrets: ['${FLEET_SECRET}']}", "fleet.pools: missing; the providers whose replicas"),
        ("{secrets: ['${FLEET_SECRET}'], pools: {own: {min: 2}}}", "fleet.pools.own.min: unknown key"),
        *(
            (f"{{secrets: ['${{FLEET_SECRET}}'], pools: {{own: {{scaling: {{max: 2}}, engine: {engine}}}}}}}", words)
            for engine, words in (
                ("{gpus: 1}", "fleet.pools.own.engine.model: missing"),
                ("{model: m, environment: [A=b]}", "engine.environment[0]: expected the name of a variable"),
                ("{model: m, gpus: -1}", "fleet.pools.own.engine.gpus: expected a whole number from 0 to 64"),
                ("{model: m, arguments: --port 1}", "fleet.pools.own.engine.arguments: expected a list of arguments"),
                ("{model: m, arguments: [--api-key=x]}", "engine.arguments[0]: --api-key is given by the controller"),
                ("{model: m, arguments: [--api-k=x]}", "engine.arguments[0]: --api-key is given by the controller"),
                ("{model: m}, rollout: {max_error_rate: 2}", "rollout.max_error_rate: expected a number of at least 0"),
            )
        ),
        ("{secrets: ['${FLEET_SECRET}'], pools: {own: {engine: {model: m}}}}", "engine without scaling: how many"),
        ("{secrets: ['${FLEET_SECRET}'], pools: {own: , owm: }}", "did you mean `own`?"),
        ("{secrets: ['${FLEET_SECRET}'], pools: {own: , vendor: }}", "vendor is not our own engine"),
        (
            "{secrets: ['${FLEET_SECRET}'], pools: {own: }, networks: []}",
            "fleet.networks: expected a list of at",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, fleet: str, words: str) -> None:
    """Each with what would be right."""
    with pytest.raises(ConfigFaults) as refusal:
        load(tmp_path, fleet)

    assert words in str(refusal.value)


def test_the_replicas_of_a_pool_serve_one_model(tmp_path: Path) -> None:
    """Versions of it are one; another model has a provider of its own."""
    fleet = "{secrets: ['${FLEET_SECRET}'], pools: {own: }}"
    file = FILE.replace(
        "models:", "models:\n  pinned: {provider: own, upstream_model: llama@2, price: {input: 1, output: 1}}"
    )
    (tmp_path / "tollgate.yaml").write_text(file.replace("FLEET", fleet))
    secrets = {"FLEET_SECRET": SECRET * 2, "ENGINE_SECRET": ENGINE_SECRET * 2}
    assert load_settings(tmp_path / "tollgate.yaml", secrets).fleet is not None
    (tmp_path / "tollgate.yaml").write_text(file.replace("llama@2", "qwen").replace("FLEET", fleet))

    with pytest.raises(ConfigFaults) as refusal:
        load_settings(tmp_path / "tollgate.yaml", secrets)
    assert "a replica serves one model, and own has llama, qwen" in str(refusal.value)
