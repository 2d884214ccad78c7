# The shipped catalogue of providers under a file's own: `groq: {}` is the row of that name, with the key of the usual
# environment variable. What the file says of a provider goes first.

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.config.fields import Faults, complain, is_empty, meant
from gateway.config.tree import Fault, Items, Node, Scalar, Section, join, merge, tree_of
from gateway.core.settings import ProviderSettings

CREDENTIALS = ("api_keys", "oauth", "google_key_file", "token_file", "aws")


class Preset(Struct, frozen=True, kw_only=True):
    """A row of the catalogue."""

    format: str
    base_url: str
    keys: tuple[str, ...] = ()  # environment variables, of which the first that is set has the key
    drop_fields: tuple[str, ...] = ()
    responses: str | None = None


def priced_at(provider: ProviderSettings) -> str:
    """Return the address by which the price library knows a provider: its own, or that of its row of the catalogue."""
    from gateway.model_facts.price_library import knows_provider

    own = provider.endpoints[0].base_url if provider.endpoints else ""
    row = presets().get(provider.preset or "")
    return own if row is None or knows_provider(own) else row.base_url


@cache
def presets() -> Mapping[str, Preset]:
    """Return the catalogue, by the providers' names."""
    rows = tomllib.loads((files("gateway") / "model_facts" / "providers.toml").read_text("utf-8"))
    return msgspec.convert(rows, dict[str, Preset])


def with_presets(root: Section, env: Mapping[str, str], faults: Faults) -> Section:
    """Return a file's tree with the catalogue's rows under the providers that go by them."""
    providers = root.entries.get("providers")
    if not isinstance(providers, Section):
        return root
    known = {name: _completed(name, node, env, faults) for name, node in providers.entries.items()}
    return replace(root, entries=root.entries | {"providers": replace(providers, entries=known)})


def _completed(name: str, node: Node, env: Mapping[str, str], faults: Faults) -> Node:
    said = node.entries if isinstance(node, Section) else {}
    if not isinstance(node, Section) and not is_empty(node):
        return node  # its reader says what is wrong
    asked = said.get("preset")
    if asked is None and ("format" in said or name not in presets()):
        return node
    row = asked.text if isinstance(asked, Scalar) else name
    if row not in presets():
        complain(asked or node, faults, f"no provider of the catalogue; {meant(row, presets())}")
        row = "vllm"  # lets the check of a faulty file go on
    preset = presets()[row]
    below = {"preset": row, "format": preset.format, "endpoints": [{"region": "global", "base_url": preset.base_url}]}
    below |= {"drop_fields": [*preset.drop_fields]} if preset.drop_fields else {}
    below |= {"responses": preset.responses} if preset.responses and "endpoints" not in said else {}
    tree = tree_of(below, node.path, node.line)
    assert isinstance(tree, Section)
    if preset.keys and not said.keys() & {*CREDENTIALS}:
        tree = replace(tree, entries=tree.entries | {"api_keys": _keys(preset, node, env, faults)})
    over = {key: value for key, value in said.items() if key != "preset"}
    lines = node.key_lines if isinstance(node, Section) else {}
    return merge(tree, Section(line=node.line, path=node.path, entries=over, key_lines=lines))


def _keys(preset: Preset, node: Node, env: Mapping[str, str], faults: Faults) -> Node:
    """Return the key of the usual variable as if the file had named that. It is missed unless the provider is
    optional."""
    path = join(node.path, "api_keys")
    name = next((name for name in preset.keys if env.get(name)), None)
    optional = node.entries.get("optional") if isinstance(node, Section) else None
    if name is None and not (isinstance(optional, Scalar) and optional.text.lower() == "true"):
        right = f"set the environment variable {' or '.join(preset.keys)}, or say api_keys: [${{NAME}}]"
        faults.append(Fault(node.line, path, f"missing; {right}"))
    name = name or preset.keys[0]
    shown = f"${{{name}}}"
    key = Scalar(line=node.line, path=f"{path}[0]", text=env.get(name, ""), shown=shown, is_expanded=True)
    return Items(line=node.line, path=path, items=(key,))
