# What `tollgate dev` configures: the demo model and its engine, the embedded servers, secrets made at the first start,
# and whatever a --config file says on top. The result is an ordinary tollgate.yaml in the data directory, which the
# processes of the stack read like any other.

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import yaml

from gateway.config.fields import NUMBER
from gateway.config.presets import presets
from gateway.config.tree import ConfigFaults, Fault, Items, Node, Scalar, Section, merge, read_file, tree_of
from gateway.core.keys import new_admin_key
from gateway.core.private_files import write_privately
from protocol.errors import Unshown

CHECKPOINT = Path(__file__).resolve().parents[2] / "gpu_backend" / "demo_model" / "checkpoint"
DEMO_MODEL = "tollgate-demo"
DEMO_PRICE = {"input": 0.05, "output": 0.10}  # USD per million tokens: what teams are charged, small but not nothing
DEMO_ABILITIES = ("chat", "completions", "embeddings", "json", "logprobs")
DEMO_PROVIDERS = ("own", "tollgate-demo")  # the second where a --config file has an `own` of its own
DRAIN = 10  # seconds: at a desk a minute is long after Ctrl-C


class StackSecrets(Unshown, msgspec.Struct):
    """Made at the first start and kept, mode 0600, so that every later start has the same keys."""

    admin_key: str
    key_pepper: str
    team_key: str | None = None  # known once the stack has run for the first time
    port: int | None = None  # of the gateway, for commands in this folder
    engine_port: int | None = None
    engine_secret: str = ""  # what the engine demands: else any web page could have the browser call it

    @classmethod
    def load(cls, path: Path) -> StackSecrets:
        """Return the secrets at ``path``; make them if there are none."""
        try:
            known = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            known = cls(new_admin_key(), secrets.token_urlsafe(32))
        if not known.engine_secret:
            known.engine_secret = secrets.token_urlsafe(32)
            known.save(path)
        return known

    def save(self, path: Path) -> None:
        """Write them, readable by their owner alone."""
        write_privately(path, msgspec.json.encode(self))


def read_config_file(path: Path, env: Mapping[str, str] = os.environ) -> Section:
    """Return the tree of a --config file, variables filled in; raise ConfigFaults where it cannot be read."""
    tree, faults = read_tree(path, env)
    if faults or tree is None:
        raise ConfigFaults(path, faults)
    return tree


def read_tree(path: Path, env: Mapping[str, str] = os.environ) -> tuple[Section | None, list[Fault]]:
    """Return the same with what is wrong with it, so that it can be told with all else."""
    faults: list[Fault] = []
    tree = read_file(path, env, faults)
    models = tree.entries.get("models") if tree is not None else None
    if isinstance(models, Section) and DEMO_MODEL in models.entries:
        taken = "`tollgate dev` brings a model of this name itself; choose another"
        faults.append(Fault(models.key_lines[DEMO_MODEL], f"models.{DEMO_MODEL}", taken))
    return tree, faults


def stack_config(
    checkpoint: Path,
    engine_url: str,
    stores: Mapping[str, str],
    known: StackSecrets,
    file: Section | None,
    env: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the demo's own settings, in the shape of tollgate.yaml, for a --config file to lie upon.

    ``stores`` are the URLs of the servers that the stack runs itself: ``database_url``, ``redis_url``. Without a file,
    the providers of the catalogue whose keys ``env`` has are offered with all their models.
    """
    providers = file.entries.get("providers") if file is not None else None
    taken = providers.entries if isinstance(providers, Section) else {}
    provider = next(name for name in DEMO_PROVIDERS if name not in taken)
    context = int(json.loads((checkpoint / "config.json").read_bytes())["max_position_embeddings"])
    return {
        **stores,
        "admin_keys": [known.admin_key],
        "key_pepper": known.key_pepper,
        "providers": {
            provider: {
                "format": "openai",
                "self_hosted": True,
                "api_keys": [known.engine_secret],
                "endpoints": [{"region": "local", "base_url": f"{engine_url}/v1"}],
            }
        }
        # Optional: a command in another shell reads this file too, where the key may not be set.
        | {name: {"models": "*", "optional": True} for name in (with_keys(env) if file is None else ())},
        "models": {
            DEMO_MODEL: {
                "provider": provider,
                "price": DEMO_PRICE,
                "context": context,
                "max_output": context,
                "abilities": list(DEMO_ABILITIES),
            }
        },
        "routes": {"auto": {"small": [DEMO_MODEL], "large": [DEMO_MODEL]}},
        "drain": f"{DRAIN}s",
        "lame_duck": "0s",  # no balancer to wait for
    }


def settings_to_check(file: Section | None) -> dict[str, Any]:
    """Return what `tollgate dev` lays under a --config file, with stand-ins for secrets and addresses."""
    stores = {"database_url": "postgresql://127.0.0.1/tollgate", "redis_url": "redis://127.0.0.1"}
    known = StackSecrets(new_admin_key(), secrets.token_urlsafe(32), engine_secret=secrets.token_urlsafe(32))
    return stack_config(CHECKPOINT, "http://127.0.0.1:8100", stores, known, file)


def with_keys(env: Mapping[str, str]) -> list[str]:
    """Return the providers of the catalogue whose keys stand in the usual environment variables, and whose models have
    prices."""
    found = [name for name, preset in presets().items() if any(map(env.get, preset.keys))]
    if not found:
        return []
    from gateway.model_facts.price_library import knows_provider  # a quarter of a second

    return [name for name in found if knows_provider(presets()[name].base_url)]


def joined(stack: Mapping[str, Any], file: Section | None, data_dir: Path) -> Section:
    """Return the whole configuration: the stack's, the file's upon it, and the data directory, never from the file."""
    tree = tree_of(stack)
    assert isinstance(tree, Section)
    if file is not None:
        tree = merge(tree, file)
    data = tree_of({"data_dir": str(data_dir)})
    assert isinstance(data, Section)
    return merge(tree, data)


def text_at(tree: Section, *path: str | int) -> str | None:
    """Return the text at a path of keys and positions, if there is one."""
    node: Node | None = tree
    for step in path:
        match node:
            case Section() if isinstance(step, str):
                node = node.entries.get(step)
            case Items() if isinstance(step, int) and step < len(node.items):
                node = node.items[step]
            case _:
                return None
    return node.text if isinstance(node, Scalar) else None


def to_yaml(tree: Section) -> str:
    """Return a tree as YAML text that reads back as the same tree."""
    text: str = yaml.serialize(_yaml_node(tree), Dumper=yaml.SafeDumper, allow_unicode=True, width=math.inf)
    return text


def _yaml_node(node: Node) -> yaml.Node:
    match node:
        case Section(entries=entries):
            pairs = [(yaml.ScalarNode(_TEXT, key), _yaml_node(each)) for key, each in entries.items()]
            return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)
        case Items(items=items):
            return yaml.SequenceNode("tag:yaml.org,2002:seq", [_yaml_node(each) for each in items], flow_style=False)
        case Scalar(text=text, is_quoted=is_quoted):
            # Texts stand in quotes, for YAML might read them as something else; numbers and switches stay bare.
            is_nothing = (node.is_expanded and not text) or (not is_quoted and text in ("", "~", "null"))
            if not is_nothing and (is_quoted or not (text in ("true", "false") or NUMBER.fullmatch(text))):
                return yaml.ScalarNode(_TEXT, text.replace("${", "$${"), style='"')
            bare = "~" if is_nothing else text
            return yaml.ScalarNode(_RESOLVER.resolve(yaml.ScalarNode, bare, (True, False)), bare)


_TEXT = "tag:yaml.org,2002:str"
_RESOLVER = yaml.resolver.Resolver()
