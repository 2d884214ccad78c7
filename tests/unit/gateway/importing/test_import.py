# Configurations of LiteLLM and Portkey become a tollgate.yaml that loads; every line that it does not hold is told, and
# no secret is copied.

from __future__ import annotations

import json
from decimal import Decimal
from hashlib import blake2s
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from billing.core.money import to_nano
from gateway.cli import app
from gateway.config.file import load_settings
from gateway.core.settings import Settings
from router.catalog.targets import Capability

LITELLM = """\
model_list:
  - model_name: chat
    litellm_params:
      model: gpt-4o
      api_key: sk-stands-in-the-file-1
      weight: 3
      rpm: 480
  - model_name: chat
    litellm_params:
      model: azure/chat-v-2
      api_base: https://acme.openai.azure.com/
      api_version: "2024-02-01"
      api_key: os.environ/AZURE_KEY_OF_OURS
      weight: 1
    model_info: {base_model: azure/gpt-4o, id: "7"}
  - model_name: big
    litellm_params: {model: claude-sonnet-4-5, timeout: 300, temperature: 0.2}
  - model_name: own
    litellm_params:
      model: openai/llama-3
      api_base: http://gpu-0:8000
      api_key: none
      input_cost_per_token: 0.0000004
      output_cost_per_token: 8e-7
      frobnicate: 1
  - model_name: words
    litellm_params: {model: text-embedding-3-small}
    model_info: {mode: embedding}
  - model_name: pictures
    litellm_params: {model: dall-e-3}
    model_info: {mode: audio_speech}
  - model_name: cloud
    litellm_params: {model: sagemaker/llama, aws_region_name: us-west-2}
  - model_name: vertex
    litellm_params: {model: vertex_ai/gemini-1.5-pro, api_base: "https://host.example/v1"}
  - model_name: groq/*
    litellm_params: {model: groq/*, api_key: os.environ/GROQ_API_KEY}
litellm_settings:
  drop_params: true
  num_retries: 2
  request_timeout: 60
  fallbacks: [{chat: [big, cloud]}]
  context_window_fallbacks: [{chat: [own]}]
  cache: true
  cache_params: {type: redis, host: localhost, ttl: 600}
  success_callback: [langfuse]
router_settings:
  routing_strategy: least-busy
  model_group_alias: {gpt-4: chat, gone: nothing}
general_settings:
  master_key: sk-stands-in-the-file-2
  database_url: postgresql://user:stands-in-the-file-3@host/db
  alerting: [slack]
brand_new_settings: {anything: 1}
"""


def run(folder: Path, content: str, *more: str) -> tuple[Result, Path]:
    source, out = folder / "theirs.yaml", folder / "ours.yaml"
    source.write_text(content)
    return CliRunner().invoke(app, ["import", str(source), "--out", str(out), *more]), out


class Everything(dict[str, str]):
    """An environment in which every variable is set."""

    def get(self, name: str, default: object = None) -> str:
        return {
            "DATABASE_URL": "postgresql://u:p@db/x",
            "TOLLGATE_DATABASE_URL": "postgresql://u:p@db/x",
            "REDIS_URL": "redis://r",
        }.get(name, blake2s(name.encode()).hexdigest())

    def __getitem__(self, name: str) -> str:
        return self.get(name)

    def __contains__(self, name: object) -> bool:
        return True


def loaded(out: Path) -> Settings:
    return load_settings(out, Everything())


def test_litellms_file_becomes_one_that_loads(tmp_path: Path) -> None:
    """Models with their places, weights and prices, fallbacks, aliases, patience and the cache are as they were."""
    result, out = run(tmp_path, LITELLM)
    assert result.exit_code == 0, result.output
    settings = loaded(out)
    models = settings.models
    one, other = models["chat"].everywhere

    assert [(each.provider, each.upstream_model, each.portion) for each in (one, other)] == [
        ("openai", "gpt-4o", 3), ("azure", "chat-v-2", 1),
    ]  # fmt: skip
    assert one.price == other.price  # by base_model
    azure = settings.providers["azure"]
    assert (azure.api_version, azure.endpoints[0].base_url) == ("2024-02-01", "https://acme.openai.azure.com")
    assert azure.api_keys == (Everything().get("AZURE_KEY_OF_OURS"),)
    own = models["own"]
    assert (own.price.input, own.price.output) == (to_nano(Decimal("0.4")), to_nano(Decimal("0.8")))
    assert settings.providers[own.provider].endpoints[0].base_url == "http://gpu-0:8000/v1"
    assert models["words"].capabilities == {Capability.EMBEDDINGS}
    assert models.keys().isdisjoint({"pictures", "cloud", "vertex"})
    assert any(name.startswith("groq/") for name in models)
    assert (settings.fallbacks["chat"], settings.aliases) == (("big", "own"), {"gpt-4": "chat"})
    anthropic = settings.providers["anthropic"]
    assert (anthropic.timeouts.total, azure.timeouts.total, azure.retries.attempts) == (300.0, 60.0, 3)
    assert (settings.cache.models["chat"], settings.cache.ttl) == ("all", 600.0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (7, "model_list[0].litellm_params.rpm: not carried over: an upstream's own limits are learned"),
        (17, "model_list[2].litellm_params.temperature: not carried over: callers say it themselves"),
        (25, "model_list[3].litellm_params.frobnicate: not carried over"),
        (30, "model_list[5].litellm_params.model: the model is left out: no endpoint for audio_speech"),
        (
            33,
            "model_list[6].litellm_params.model: the model is left out: no provider of the catalogue serves sagemaker",
        ),
        (39, "litellm_settings.drop_params: so anyway"),
        (46, "litellm_settings.success_callback: not carried over: metrics are at /metrics"),
        (48, "router_settings.routing_strategy: targets share by `weight`"),
        (49, "router_settings.model_group_alias.gone: left out: there is no model nothing"),
        (53, "general_settings.alerting: not carried over"),
        (54, "brand_new_settings: not carried over"),
    ],
)
def test_what_is_not_carried_over_is_told_by_its_line(tmp_path: Path, line: int, words: str) -> None:
    """Known or not: nothing is passed over in silence."""
    result, _ = run(tmp_path, LITELLM)

    assert f"theirs.yaml:{line}: {words}" in result.output, result.output


def test_no_secret_is_copied(tmp_path: Path) -> None:
    """Neither into the file nor onto the screen; the variable that takes its place is named."""
    result, out = run(tmp_path, LITELLM)

    assert "stands-in-the-file" not in out.read_text() + result.output
    assert "model_list[0].litellm_params.api_key: a secret is not copied: set OPENAI_API_KEY_2 to it" in result.output
    assert "general_settings.master_key: a secret is not copied: set TOLLGATE_ADMIN_KEY to it" in result.output


def test_what_is_left_to_be_said_is_told(tmp_path: Path) -> None:
    """A deployment whose price no library knows; the file is there all the same."""
    content = "model_list: [{model_name: m, litellm_params: {model: azure/deployed, api_key: os.environ/K}}]"
    result, out = run(tmp_path, content)

    assert result.exit_code == 0 and out.exists()
    assert "models.m.price: missing, and the price library does not know deployed" in result.output
    assert "1 things are left to be said there" in result.output


PORTKEY: dict[str, Any] = {
    "strategy": {"mode": "loadbalance"},
    "targets": [
        {"virtual_key": "anthropic-a1b2", "weight": 0.25, "override_params": {"model": "claude-sonnet-4-5"}},
        {
            "weight": 0.75,
            "strategy": {"mode": "fallback", "on_status_codes": [429]},
            "targets": [
                {"provider": "openai", "api_key": "sk-stands-in-the-file", "override_params": {"model": "gpt-4o"}},
                {"provider": "mistral-ai", "override_params": {"model": "mistral-large-latest", "top_p": 0.5}},
                {"provider": "stability-ai"},
            ],
        },
    ],
    "retry": {"attempts": 4},
    "request_timeout": 10000,
    "cache": {"mode": "simple", "max_age": 60},
}


def test_portkeys_config_becomes_one_that_loads(tmp_path: Path) -> None:
    """Nested strategies are one model with weights, and what steps in for it; the rest is told by its line."""
    result, out = run(tmp_path, json.dumps(PORTKEY, indent=1), "--name", "assistant")
    assert result.exit_code == 0, result.output
    settings = loaded(out)
    places = settings.models["assistant"].everywhere

    assert [(each.provider, each.upstream_model, each.portion) for each in places] == [
        ("anthropic", "claude-sonnet-4-5", 0.25), ("openai", "gpt-4o", 0.75),
    ]  # fmt: skip
    (spare,) = settings.fallbacks["assistant"]
    assert settings.models[spare].upstream_model == "mistral-large-latest"
    openai = settings.providers["openai"]
    assert (openai.timeouts.total, openai.retries.attempts) == (10.0, 5)
    assert (settings.cache.models, settings.cache.ttl) == ({"assistant": "all"}, 60.0)
    for words in ("the key lies with Portkey", "on_status_codes: not carried over", "top_p: not carried over"):
        assert words in result.output
    assert "stability-ai is none of the catalogue's providers" in result.output
    assert "stands-in-the-file" not in out.read_text() + result.output


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"provider": "openai"}, "its model is each call's own: ask for openai/MODEL"),
        ({"strategy": {"mode": "conditional", "conditions": [1]}, "targets": [{"provider": "groq"}]}, "'conditional'"),
        ({"provider": "openai", "cache": {"mode": "semantic"}}, "mode semantic is not carried over"),
    ],
)
def test_what_portkey_does_otherwise_is_told(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    """Models of the call's own, conditions, a cache by likeness."""
    result, _ = run(tmp_path, json.dumps(config))

    assert words in result.output, result.output


def test_nothing_is_written_over_or_guessed(tmp_path: Path) -> None:
    """A file that is there stays; one of no gateway that is known is refused, with what would be right."""
    _, out = run(tmp_path, LITELLM)
    before = out.read_text()
    again, _ = run(tmp_path, LITELLM)
    out.unlink()
    unknown, _ = run(tmp_path, "listen: 80")
    broken, _ = run(tmp_path, "a: [")

    assert (again.exit_code, unknown.exit_code, broken.exit_code) == (1, 1, 1)
    assert "is there already" in again.output and before
    assert "`model_list`" in unknown.output and "not YAML" in broken.output
    assert not out.exists()
