# The shipped catalogue of providers: a name and a key are enough, and what is missing is said.

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from billing.core.money import to_nano
from gateway.config.file import ConfigFaults, load_settings
from gateway.config.offers import all_priced
from gateway.config.presets import presets
from gateway.core.settings import DIRECT, Settings
from gateway.model_facts.listed_models import hears
from gateway.model_facts.price_library import knows_provider
from router.catalog.targets import Capability, Endpoint

HEAD = """\
database_url: postgresql://h/db
redis_url: redis://h
admin_keys: [tgadmin-4c1f09a27be85d63]
key_pepper: 8b1d64f0c2a9735e1188
"""
LLAMA = "llama-3.3-70b-versatile"
KEYS = {name: f"sk-{name.lower()}" for row in presets().values() for name in row.keys}


def load(tmp_path: Path, text: str, env: Mapping[str, str] = KEYS) -> Settings:
    file = tmp_path / "tollgate.yaml"
    file.write_text(HEAD + text)
    return load_settings(file, env)


def faults_of(tmp_path: Path, text: str, env: Mapping[str, str] = KEYS) -> list[tuple[int, str, str]]:
    with pytest.raises(ConfigFaults) as raised:
        load(tmp_path, text, env)
    return [(fault.line, fault.path, fault.message) for fault in raised.value.faults]


def test_a_name_and_a_key_are_enough(tmp_path: Path) -> None:
    """`groq: {}`, or nothing at all behind the name."""
    settings = load(tmp_path, 'providers: {groq: {models: "*"}, deepseek: {}, xai: }\n')
    groq = settings.providers["groq"]

    assert (groq.format, groq.api_keys) == ("openai", ("sk-groq_api_key",))
    assert groq.egress is DIRECT
    assert groq.endpoints == (Endpoint("global", "https://api.groq.com/openai/v1"),)
    assert "verbosity" in groq.drop_fields
    assert settings.providers["xai"].api_keys == ("sk-xai_api_key",)
    assert settings.models["groq/llama-3.3-70b-versatile"].price.input > 0


def test_a_row_at_an_address_of_ones_own_has_its_prices(tmp_path: Path) -> None:
    """Under the row's name or another: named models, all of them, and those of `models`; a row without any has none."""
    at = 'endpoints: [{region: eu, base_url: "https://llm.corp.test/v1"}]'
    text = f"providers: {{groq: {{}}, corp: {{preset: groq, api_keys: [k], models: [{LLAMA}], {at}}}}}\n"
    settings = load(tmp_path, text + f"models: {{usual: {{provider: groq, upstream_model: {LLAMA}}}}}\n")
    price = settings.models["usual"].price
    under_its_name = load(tmp_path, f'providers: {{groq: {{models: "*", {at}}}}}\n').models[f"groq/{LLAMA}"]

    assert settings.models[f"corp/{LLAMA}"].price == price == under_its_name.price
    assert settings.models[f"corp/{LLAMA}"].provider == "corp"
    [fault] = faults_of(tmp_path, f"providers: {{corp: {{preset: vllm, models: [{LLAMA}], {at}}}}}\n")
    assert "no prices are known of this provider" in fault[2]


def test_what_is_wrong_in_a_section_that_stands_twice_is_told_of_both(tmp_path: Path) -> None:
    """At once, beside the duplicate key."""
    found = faults_of(tmp_path, "providers: {groq: {models: [none-such]}}\nproviders: {xai: {models: [neither]}}\n")

    assert [fault[:2] for fault in found] == [
        (5, "models.groq/none-such.price"),
        (6, "models.xai/neither.price"),
        (6, "providers"),
    ]


def test_a_missing_key_is_named_by_its_variable(tmp_path: Path) -> None:
    """And an optional provider without one is left out."""
    [fault] = faults_of(tmp_path, 'providers:\n  groq: {models: "*"}\n', {})
    assert fault[:2] == (6, "providers.groq.api_keys") and "GROQ_API_KEY" in fault[2]

    settings = load(tmp_path, 'providers: {groq: {models: "*"}, gemini: {optional: true, models: "*"}}\n', KEYS | {
        "GEMINI_API_KEY": "", "GOOGLE_API_KEY": ""})  # fmt: skip
    assert [one.provider for one in settings.left_out] == ["gemini"]
    assert not any(name.startswith("gemini/") for name in settings.models)


def test_another_variable_will_do(tmp_path: Path) -> None:
    """Some providers' keys have two usual names."""
    settings = load(tmp_path, 'providers: {gemini: {models: "*"}}\n', {"GOOGLE_API_KEY": "g"})

    assert settings.providers["gemini"].api_keys == ("g",)


def test_what_the_file_says_goes_first(tmp_path: Path) -> None:
    """Keys, endpoints, patience; and a row under another name, for a second account."""
    settings = load(
        tmp_path,
        """\
providers:
  groq: {api_keys: [mine], timeouts: {total: 9s}, drop_fields: [seed], models: [llama-3.1-8b-instant]}
  second: {preset: groq, models: [llama-3.3-70b-versatile]}
  ollama: {endpoints: [{region: lan, base_url: "http://10.0.0.7:11434/v1"}]}
models: {qwen: {provider: ollama, price: {input: 0, output: 0}}}
""",
    )
    groq, second = settings.providers["groq"], settings.providers["second"]

    assert (groq.api_keys, groq.timeouts.total, groq.drop_fields) == (("mine",), 9.0, {"seed"})
    assert (second.api_keys, second.endpoints) == (("sk-groq_api_key",), groq.endpoints)
    assert settings.providers["ollama"].endpoints[0].region == "lan" and settings.providers["ollama"].api_keys == ()
    assert {*settings.models} == {"groq/llama-3.1-8b-instant", "second/llama-3.3-70b-versatile", "qwen"}


def test_a_provider_with_a_format_is_the_files_own(tmp_path: Path) -> None:
    """Whatever its name: files of before mean what they meant."""
    text = """\
providers: {groq: {format: openai, endpoints: [{region: r, base_url: "http://h/v1"}]}}
models: {a: {provider: groq, price: {input: 1, output: 1}}}
"""
    groq = load(tmp_path, text).providers["groq"]

    assert (groq.api_keys, groq.drop_fields, groq.endpoints) == ((), set(), (Endpoint("r", "http://h/v1"),))


def test_a_row_that_has_the_responses_api_is_asked_there(tmp_path: Path) -> None:
    """At the row's own address; an address of the file's may be another service's."""
    text = "providers: {openai: {models: [gpt-4o]}, own: {preset: openai, api_keys: [k], endpoints: [ENDPOINT]}}\n"
    text = text.replace("ENDPOINT", "{region: r, base_url: 'http://h/v1'}")
    providers = load(tmp_path, text).providers

    assert (providers["openai"].responses, providers["own"].responses) == (True, False)


@pytest.mark.parametrize("name", presets())
def test_every_row_offers_models_of_which_all_can_be_read(tmp_path: Path, name: str) -> None:
    """Each model of the price library under its own name, at a price; those without one are left out, and told."""
    unpriced_row = not knows_provider(presets()[name].base_url)
    more = "" if unpriced_row else ', models: "*"'
    text = f"providers: {{{name}: {{optional: false{more}}}}}\n"
    if unpriced_row:
        text += f"models: {{own: {{provider: {name}, price: {{input: 0, output: 0}}}}}}\n"
    settings = load(tmp_path, text)
    priced, unpriced = all_priced(settings.providers[name])

    assert len(settings.models) == (1 if unpriced_row else len(priced)) > 0
    assert not {*priced} & {*unpriced}
    assert unpriced_row or all(model.price.input > 0 for model in settings.models.values())


def test_what_a_model_can_do_is_told_by_its_name(tmp_path: Path) -> None:
    """Pictures go to models that are known to take them, vectors come from those that make them."""
    models = load(tmp_path, 'providers: {openai: {models: "*"}, mistral: {models: "*"}}\n').models

    assert Capability.VISION in models["openai/gpt-4o"].capabilities
    assert Capability.VISION not in models["openai/o3-mini"].capabilities
    assert models["openai/text-embedding-3-small"].capabilities == {Capability.EMBEDDINGS}
    assert models["mistral/mistral-embed"].capabilities == {Capability.EMBEDDINGS}
    assert not any("4o-audio" in name or "realtime" in name or "image" in name for name in models)


def test_what_hears_has_a_price_for_that(tmp_path: Path) -> None:
    """What the price library knows no rate of would be charged as words, a sixteenth of what it costs."""
    text = 'providers: {openai: {models: ["*", gpt-4o-audio-preview]}, gemini: {models: "*"}}\n'
    models = load(tmp_path, text).models
    hearing = {name: model.price for name, model in models.items() if Capability.AUDIO in model.capabilities}

    assert {"openai/gpt-audio", "openai/gpt-audio-mini"} == {name for name in hearing if name.startswith("openai/")}
    assert hearing["openai/gpt-audio"].audio_input == to_nano(32) and "gemini/gemini-2.5-flash" in hearing
    assert not hears("openai/gpt-audio")  # OpenRouter's name of it, of which the library knows the words alone


@pytest.mark.parametrize("upstream", ["gpt-4o-audio-preview", "gpt-audio"])
def test_a_model_that_is_said_to_hear_is_charged_for_sound_or_refused(tmp_path: Path, upstream: str) -> None:
    """A price of the words alone is none of what is heard: the file is to say it."""
    text = "providers: {openai: {}}\nmodels: {ear: {provider: openai, upstream_model: " + upstream
    text += ", abilities: [chat, audio]}}\n"
    if upstream == "gpt-audio":
        assert load(tmp_path, text).models["ear"].price.audio_output == to_nano(64)
        return
    with pytest.raises(ConfigFaults, match=r"not what it hears; add price: .*, audio_input: "):
        load(tmp_path, text)


def test_what_writes_down_is_charged_what_hearing_costs(tmp_path: Path) -> None:
    """Its upstream counts tokens of one kind: those of words cost less than half."""
    text = "providers: {openai: {}}\nmodels: {ear: {provider: openai, upstream_model: gpt-4o-transcribe, "
    model = load(tmp_path, text + "abilities: [transcription]}}\n").models["ear"]

    assert (model.price.input, model.price.output) == (to_nano(6), to_nano(10))


def test_a_snapshot_is_named_beside_all(tmp_path: Path) -> None:
    """The library lists models once, and knows the price of a snapshot by its name."""
    models = load(tmp_path, 'providers: {openai: {models: ["*", gpt-4o-2024-08-06]}}\n').models

    assert models["openai/gpt-4o-2024-08-06"].price == models["openai/gpt-4o"].price


def test_a_model_of_the_file_hides_the_offered_one(tmp_path: Path) -> None:
    """A price or an ability that the file knows better."""
    text = """\
providers: {openai: {models: [gpt-4o, gpt-4o-mini]}}
models: {openai/gpt-4o: {provider: openai, upstream_model: gpt-4o, note: ours}}
aliases: {gpt: openai/gpt-4o-mini}
"""
    settings = load(tmp_path, text)

    assert settings.models["openai/gpt-4o"].note == "ours"
    assert settings.catalog().meaning("gpt") == "openai/gpt-4o-mini"


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("providers: {mine: {preset: grok}}", "providers.mine.preset", "did you mean `groq`?"),
        ("providers: {groq: {models: [nothing-like-it]}}", "models.groq/nothing-like-it.price", "does not know"),
        ('providers: {ollama: {models: "*"}}', "providers.ollama.models", "each with its price"),
        ('providers: {mine: {format: openai, models: "*"}}', "providers.mine.endpoints", "missing"),
        ("providers: {vllm: {models: [gpt-oss-20b]}}", "providers.vllm.models", "each with its price"),
        ("providers: {groq: {models: []}}", "providers.groq.models", "at least 1"),
        ("providers: {groq: {drop_fields: [messages]}}", "providers.groq.drop_fields[0]", "expected one of seed"),
        ("providers: {groq: {headers: {Authorization: x}}}", "providers.groq.headers.Authorization", "api_keys"),
        ("providers: {groq: {headers: {'a b': x}}}", "providers.groq.headers.a b", "letters, digits"),
        ('providers: {groq: {headers: {a: "x\\r\\ny: z"}}}', "providers.groq.headers.a", "one line"),
        ("providers: {groq: {headers: [a]}}", "providers.groq.headers", "headers by name"),
        ("providers: {groq: {proxy: 'https://proxy'}}", "providers.groq.proxy", "http://proxy:3128"),
        ("providers: {groq: {proxy: 'http://proxy/path'}}", "providers.groq.proxy", "host and port alone"),
        ("providers: {groq: {ca_file: /no/such.pem}}", "providers.groq.ca_file", "No such file"),
        ("providers: {groq: {google_key_file: /no/such.json}}", "providers.groq.google_key_file", "No such file"),
        ("providers: {groq: {google_key_file: /etc/hostname}}", "providers.groq.google_key_file", "service account"),
        ("providers: {groq: {ca_file: /etc/hostname}}", "providers.groq.ca_file", "no certificate"),
    ],
)
def test_a_faulty_row_is_refused(tmp_path: Path, text: str, path: str, words: str) -> None:
    """With what would be right."""
    models = "" if "models: [nothing" in text else "\nmodels: {m: {provider: p, price: {input: 1, output: 1}}}"
    found = [fault for fault in faults_of(tmp_path, text + models + "\n") if fault[1] != "models.m.provider"]

    assert [(fault_path, words in message) for _, fault_path, message in found][:1] == [(path, True)], found


def test_teams_own_keys_are_read_by_team_and_refused_where_none_can_be(tmp_path: Path) -> None:
    """A team whose variable is empty has none; an optional provider stays for those that have; no message has a key."""
    said = 'team_keys: {search: ["${SEARCH_KEY}"], chat: ["${CHAT_KEY:-}"]}'
    env = {**KEYS, "GROQ_API_KEY": "", "SEARCH_KEY": "sk-search"}
    settings = load(tmp_path, f'providers: {{groq: {{optional: true, models: "*", {said}}}}}\n', env)
    own = "own: {format: openai, self_hosted: true, endpoints: [{region: here, base_url: 'http://gpu/v1'}], "
    faults = faults_of(tmp_path, f"providers:\n  {own}{said}}}\nmodels: {{}}\n", env)
    twice = faults_of(tmp_path, 'providers: {groq: {team_keys: {search: ["${SEARCH_KEY}", "${SEARCH_KEY}"]}}}\n', env)
    told = [message for _, path, message in (*faults, *twice) if "team_keys" in path]

    groq = settings.providers["groq"]
    assert (groq.api_keys, groq.team_keys, settings.left_out) == ((), {"search": ("sk-search",)}, ())
    assert "asked with keys" in told[0] and "twice" in told[1] and "sk-search" not in str(faults) + str(twice)
