# Optional providers: without a key they are left out, with everything that names them; a typo stays a fault.

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config.file import ConfigFaults, Fault, load_settings
from gateway.core.settings import LeftOut, Settings

ROOT = Path(__file__).parents[4]
STORES = {
    "DATABASE_URL": "postgresql://house:pass@db/tollgate",
    "REDIS_URL": "redis://cache:6379/0",
    "TOLLGATE_ADMIN_KEY": "tgadmin-4c1f09a27be85d63",
    "TOLLGATE_KEY_PEPPER": "8b1d64f0c2a9735e1188",
}
FILE = """\
database_url: ${DATABASE_URL}
redis_url: ${REDIS_URL}
admin_keys: ["${TOLLGATE_ADMIN_KEY}"]
key_pepper: ${TOLLGATE_KEY_PEPPER}
providers:
  outside: {format: openai, optional: true, api_keys: [${FIRST:-}, "${SECOND:-}"], endpoints: [{region: o, base_url: "http://o/v1"}]}
  own: {format: openai, endpoints: [{region: l, base_url: "http://l/v1"}]}
models:
  big: {provider: outside, price: {input: 1, output: 1}}
  judge: {provider: outside, price: {input: 1, output: 1}}
  house: {provider: own, price: {input: 1, output: 1}}
routes:
  auto: {small: [house], large: [big], held_back: {share: 0.1, usd_per_day: 1, judge: judge}}
  best: {small: [judge], large: [big]}
fallbacks: {big: [house], house: [big, judge]}
aliases: {old-big: big, old-house: house}
"""


def load(folder: Path, text: str = FILE, **env: str) -> Settings:
    file = folder / "tollgate.yaml"
    file.write_text(text)
    return load_settings(file, STORES | env)


def faults_of(folder: Path, text: str, **env: str) -> tuple[Fault, ...]:
    with pytest.raises(ConfigFaults) as refusal:
        load(folder, text, **env)
    return refusal.value.faults


def test_an_optional_provider_without_a_key_goes_with_all_that_names_it(tmp_path: Path) -> None:
    """Its models, aliases and fallbacks go; a route shrinks to what is left, and goes where nothing is."""
    settings = load(tmp_path)
    (left_out,) = settings.left_out

    assert list(settings.providers) == ["own"]
    assert list(settings.models) == ["house"]
    assert (settings.auto["auto"].small, settings.auto["auto"].large) == (("house",), ("house",))
    assert settings.auto["auto"].shadow is not None and settings.auto["auto"].shadow.judge is None
    assert list(settings.auto) == ["auto"]
    assert settings.fallbacks == {}
    assert settings.aliases == {"old-house": "house"}
    assert (left_out.provider, left_out.models, left_out.aliases) == ("outside", ("big", "judge"), ("old-big",))
    assert left_out.routes == ("auto", "best")


@pytest.mark.parametrize("name", ["FIRST", "SECOND"])
def test_one_key_is_enough(tmp_path: Path, name: str) -> None:
    """With any of its keys the provider is there, and everything with it."""
    settings = load(tmp_path, **{name: "sk-1"})

    assert settings.left_out == ()
    assert list(settings.models) == ["big", "judge", "house"]
    assert settings.fallbacks == {"big": ("house",), "house": ("big", "judge")}


def test_a_provider_that_is_not_marked_is_never_left_out(tmp_path: Path) -> None:
    """An empty default is an upstream that asks for no key; a variable without one is missed."""
    unmarked = FILE.replace("optional: true, ", "")

    assert list(load(tmp_path, unmarked).providers) == ["outside", "own"]
    (fault,) = faults_of(tmp_path, FILE.replace("${FIRST:-}", "${FIRST}"))
    assert (fault.line, fault.path) == (6, "providers.outside.api_keys[0]")


@pytest.mark.parametrize(
    ("right", "wrong", "path"),
    [
        ("large: [big], held", "large: [bgi], held", "routes.auto.large[0]"),
        ("old-big: big", "old-big: bgi", "aliases.old-big"),
        ("house: [big,", "house: [bgi,", "fallbacks.house[0]"),
        ("big: {provider: outside", "big: {provider: outsied", "models.big.provider"),
        (
            "judge: {provider: outside, price: {input: 1, output: 1}}",
            "judge: {provider: outside, prise: 1}",
            "models.judge.prise",
        ),
    ],
)
def test_a_typo_is_a_fault_whether_or_not_the_key_is_there(tmp_path: Path, right: str, wrong: str, path: str) -> None:
    """What is left out was read and checked like everything else."""
    assert FILE.count(right) == 1
    without, with_key = (faults_of(tmp_path, FILE.replace(right, wrong), **env) for env in ({}, {"FIRST": "sk"}))

    assert path in [fault.path for fault in without]
    assert without == with_key


def test_a_house_without_any_provider_is_refused(tmp_path: Path) -> None:
    """It could answer nothing; and a provider that names no key cannot be optional."""
    (fault,) = faults_of(
        tmp_path, FILE.replace("own: {format: openai", "own: {format: openai, optional: true, api_keys: ['${X:-}']")
    )
    (keyless,) = faults_of(tmp_path, FILE.replace("own: {format: openai", "own: {format: openai, optional: true"))

    assert (fault.line, fault.path) == (5, "providers")
    assert (keyless.line, keyless.path) == (7, "providers.own.optional")


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "ENGINE_SECRET"])
def test_the_example_starts_with_any_one_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`config check` says which providers are left out, and the route `auto` has models to choose from."""
    for variable in re.findall(r"\$\{(\w+)", (ROOT / "tollgate.yaml").read_text()):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)
    for variable, value in {**STORES, name: "sk-of-the-tests"}.items():
        monkeypatch.setenv(variable, value)

    done = CliRunner().invoke(app, ["config", "check", str(ROOT / "tollgate.yaml")])
    settings = load_settings(ROOT / "tollgate.yaml")

    assert done.exit_code == 0
    assert done.output.count("is left out") == 3
    assert settings.auto["auto"].small and settings.auto["auto"].large
    assert len(settings.providers) == 1


@pytest.mark.parametrize(("first", "left"), [("outside", "own"), ("own", "own")])
def test_a_model_at_several_providers_stays_at_those_with_a_key(tmp_path: Path, first: str, left: str) -> None:
    """Whichever is named first; it goes with the last of them alone."""
    second = "own" if first == "outside" else "outside"
    price = "price: {input: 1, output: 1}"
    both = f"  both: {{{price}, targets: [{{provider: {first}}}, {{provider: {second}, weight: 2}}]}}\n"
    text = FILE.replace("routes:\n", f"{both}routes:\n")
    settings, whole = load(tmp_path, text), load(tmp_path, text, FIRST="sk-first")

    assert [one.provider for one in settings.models["both"].everywhere] == [left]
    assert [one.provider for one in whole.models["both"].everywhere] == [first, second]
    assert "both" not in settings.left_out[0].models


def test_many_models_that_are_left_out_are_told_by_their_number() -> None:
    """A line of `tollgate doctor` has no room for a whole catalogue."""
    few, many = (LeftOut("outside", tuple(f"m{place}" for place in range(size)), (), ()).line() for size in (5, 27))

    assert few.endswith("without models m0, m1, m2, m3, m4")
    assert many.endswith("without models m0, m1, m2 and 24 more")
