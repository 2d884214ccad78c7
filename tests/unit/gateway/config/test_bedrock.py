# A provider of Amazon Bedrock: where it is, and what it is asked with.

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.settings import AwsAccount
from tests.unit.gateway.config.test_file import HEAD, faults_of, load

RUNTIME = "https://bedrock-runtime.eu-central-1.amazonaws.com"
SONNET = "eu.anthropic.claude-sonnet-4-5-20250929-v1:0"


def with_bedrock(said: str, base_url: str = RUNTIME) -> str:
    """Return a file with a provider that speaks Converse, and a model there."""
    provider = f'{{format: bedrock, {said}endpoints: [{{region: eu, base_url: "{base_url}"}}]}}'
    model = f'{{provider: aws, upstream_model: "{SONNET}"}}'
    return HEAD.replace("    models:\n", f"      aws: {provider}\n    models:\n      sonnet: {model}\n")


def test_a_key_of_its_own_is_enough(tmp_path: Path) -> None:
    """Then nothing is signed; the model's price is the library's, and several replies are as many requests."""
    settings = load(tmp_path, with_bedrock("api_keys: [k], "))
    provider, model = settings.providers["aws"], settings.models["sonnet"]

    assert (provider.api_keys, provider.aws, provider.parallel_n) == (("k",), None, True)
    assert model.price.input > 0 and model.price.cached_input is not None and model.batch_price is None


def test_without_one_requests_are_signed(tmp_path: Path) -> None:
    """With the credentials that Amazon's own tools would take, or those of a profile."""
    pytest.importorskip("botocore", reason="an extra: tollgate[bedrock]")

    assert load(tmp_path, with_bedrock("")).providers["aws"].aws == AwsAccount()
    assert load(tmp_path, with_bedrock("aws: {profile: p}, ")).providers["aws"].aws == AwsAccount("p")


@pytest.mark.parametrize(
    ("file", "path", "words"),
    [
        (with_bedrock("api_keys: [k], ", RUNTIME + "/v1"), "providers.aws.endpoints[0].base_url", "its runtime's"),
        (with_bedrock("api_keys: [k], aws: {profile: p}, "), "providers.aws.aws", "asked in one way"),
        (HEAD.replace("{format: openai, api_keys: [${OPENAI_API_KEY}]", "{format: openai, aws: {profile: p}"),
         "providers.openai.aws", "only for the format bedrock"),
    ],
)  # fmt: skip
def test_what_is_not_meant_for_it_is_refused(tmp_path: Path, file: str, path: str, words: str) -> None:
    """By the key, and with what would be right."""
    found = [fault for fault in faults_of(tmp_path, file) if fault.path == path]

    assert found and words in found[0].message
