# Whether a provider's Batch API is used, and at which price: by its host, or as the file says.

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.gateway.config.test_file import HEAD, faults_of, load

ENDPOINT = "endpoints: [{region: r, base_url: %s}]"
AZURE = "{format: openai, api_keys: [k], api_version: 2024-10-21, batch_api: true, " + ENDPOINT % "https://a" + "}"
HERE = "{format: openai, api_keys: [k], " + ENDPOINT % "https://llm.example/v1" + "}"


def with_provider(provider: str, model: str) -> str:
    """Return a file with one more provider and a model there."""
    return HEAD.replace("    models:\n", f"      more: {provider}\n    models:\n      more: {model}\n")


@pytest.mark.parametrize(
    ("provider", "model", "discount"),
    [
        ("{format: anthropic, api_keys: [k], " + ENDPOINT % "https://api.anthropic.com" + "}", "", 0.5),
        (AZURE, "", 0.5),
        (AZURE, "batch_discount: 0.6, ", 0.6),
        (HERE, "", None),
        (HERE, "batch_discount: 0.6, ", None),
        (HERE.replace("{format", "{batch_api: true, format"), "batch_discount: 0.8, ", 0.8),
    ],
)
def test_a_batch_api_is_used_where_one_is_known_or_said(
    tmp_path: Path, provider: str, model: str, discount: float | None
) -> None:
    """At the hosts that have one, and elsewhere where the file says so; a live call costs what it did."""
    priced = "{provider: more, " + model + "price: {input: 1, output: 2}}"
    settings = load(tmp_path, with_provider(provider, priced))
    spec = settings.models["more"]

    assert (None if spec.batch_price is None else spec.batch_price.batch_discount) == discount
    assert spec.price.batch_discount == 1.0
    assert spec.batch_price is None or spec.batch_price in settings.prices()
    assert settings.models["gpt-4o"].batch_price is not None  # at api.openai.com
    assert settings.models["llama"].batch_price is None


def test_it_is_refused_where_there_is_none(tmp_path: Path) -> None:
    """Our own engine needs none, and Vertex AI has another."""
    own = HEAD.replace("self_hosted: true", "self_hosted: true, batch_api: true")
    vertex = "https://h/v1/projects/p/locations/l/publishers/google"
    asked = "{format: gemini, api_keys: [k], batch_api: true, " + ENDPOINT % vertex + "}"
    file = with_provider(asked, "{provider: more, price: {input: 1, output: 2}}")

    assert [fault.path for fault in faults_of(tmp_path, own)] == ["providers.own.batch_api"]
    assert [fault.path for fault in faults_of(tmp_path, file)] == ["providers.more.batch_api"]
    off = HEAD.replace("{format: openai, api_keys", "{batch_api: false, format: openai, api_keys")
    assert load(tmp_path, off).models["gpt-4o"].batch_price is None
