# Which gateway a command asks over HTTP, and with which keys: what the command line says, else the environment, else
# the stack of `tollgate dev` in this folder, else what `tollgate login` has kept in a file of its owner's alone.

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from gateway.core.keys import KEY_PREFIX
from gateway.core.private_files import write_privately
from gateway.terminal.config_path import CONFIG_VARIABLE, LOCAL_CONFIG
from gateway.terminal.printing import fail
from protocol.errors import Unshown

URL_VARIABLE, KEY_VARIABLE = "TOLLGATE_URL", "TOLLGATE_KEY"
LOCAL_SECRETS = LOCAL_CONFIG.with_name("secrets.json")  # of `tollgate dev` in this folder
HOWTO = f"run `tollgate login`, give --url and --api-key, or set ${URL_VARIABLE} and ${KEY_VARIABLE}"
LOOPBACK = ("localhost", "127.0.0.1", "::1")

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", help=f"Of a gateway; else ${URL_VARIABLE}, the stack of .tollgate, or that of `tollgate login`"
    ),
]
KeyOption = Annotated[
    str | None, typer.Option("--key", "--api-key", help=f"A team's or an admin key; else ${KEY_VARIABLE}, as the URL")
]
ApiKeyOption = Annotated[str | None, typer.Option("--api-key", help=f"With --url: the key; else ${KEY_VARIABLE}")]

_VISIBLE = re.compile(r"[!-~]+")


class Address(Unshown, msgspec.Struct, frozen=True, kw_only=True):
    """A gateway, and the keys that are known for it: a team's, which calls, and an admin's, which looks after it."""

    url: str
    team_key: str | None = None
    admin_key: str | None = None
    source: str = ""  # where it was found, for messages

    def with_key(self, key: str) -> Address:
        """Return the address with ``key`` as the one of its kind."""
        # What an identity provider signs, a JWT, stands for a team.
        name = "team_key" if key.startswith((KEY_PREFIX, "eyJ")) else "admin_key"
        return msgspec.structs.replace(self, **{name: key})


class _StackSecrets(Unshown, msgspec.Struct):
    """What `tollgate dev` keeps, as far as it matters here."""

    admin_key: str
    team_key: str | None = None
    port: int | None = None


def find_address(url: str | None, key: str | None, env: Mapping[str, str] = os.environ) -> Address:
    """Return the gateway that is meant; where there is none, say how to name one and exit 2."""
    said, source = (url, "--url") if url else (env.get(URL_VARIABLE), f"${URL_VARIABLE}")
    key = key or env.get(KEY_VARIABLE)
    if said:
        address = Address(url=read_url(said), source=source)
        kept = read_login(env)
        if not key and kept is not None and kept.url == address.url:
            address = kept
    else:
        found = _of_this_folder() or read_login(env)
        if found is None:
            fail(f"which gateway? {HOWTO[0].upper()}{HOWTO[1:]}", 2)
        address = found
    if key:
        address = msgspec.structs.replace(address, team_key=None, admin_key=None).with_key(read_key(key))
    if address.team_key is None and address.admin_key is None:
        fail(f"no key for {address.url}: {HOWTO}", 2)
    return address


def is_elsewhere(
    config: Path | None, url: str | None, env: Mapping[str, str] = os.environ, *, is_change: bool = False
) -> bool:
    """Whether a command that also works on a deployment's own machine is to ask a gateway over HTTP.

    One that may change something (``is_change``) asks there only where no deployment is at hand, or ``--url`` says so.
    """
    if url:
        return True
    if config is not None:
        return False
    is_at_hand = bool(env.get(CONFIG_VARIABLE)) or LOCAL_CONFIG.exists()
    if env.get(URL_VARIABLE):
        return not (is_change and is_at_hand)
    return not is_at_hand and login_file(env).exists()


def read_url(said: str) -> str:
    """Return a gateway's URL without what clients add: a path ``/v1``, a slash at its end. Exits 2 where it is none."""
    text = said.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    if "://" not in text:
        is_near = text.partition("/")[0].rpartition(":")[0].strip("[]") in LOOPBACK or text in LOOPBACK
        text = f"{'http' if is_near else 'https'}://{text}"
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or _VISIBLE.fullmatch(text) is None:
        fail(f"{said!r} is no URL of a gateway: give it as https://tollgate.example.com or http://127.0.0.1:8000", 2)
    if parts.username or parts.query or parts.fragment:
        fail("a gateway's URL has no user, query or fragment: give the key with --key", 2)
    return text


def read_key(said: str) -> str:
    """Return a key without the white space that copying brings. Exits 2 where it can be none."""
    key = said.strip()
    if not key:
        fail("no key was given: it is typed, piped in, or follows --api-key", 2)
    if _VISIBLE.fullmatch(key) is None:
        fail("the key holds characters that no key has: copy it again", 2)
    return key


def login_file(env: Mapping[str, str] = os.environ) -> Path:
    """Return where ``tollgate login`` keeps what it was told."""
    home = env.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "tollgate" / "login.json"


def read_login(env: Mapping[str, str] = os.environ) -> Address | None:
    """Return what ``tollgate login`` has kept; a file that others can read is refused."""
    path = login_file(env)
    try:
        if path.stat().st_mode & 0o077:
            fail(f"others can read {path}, which holds keys: chmod 600 {path}")
        kept = msgspec.json.decode(path.read_bytes(), type=Address)
    except FileNotFoundError:
        return None
    except OSError as exc:
        fail(f"{path} cannot be read: {exc.strerror}")
    except msgspec.DecodeError:
        fail(f"{path} is damaged: run `tollgate login` again")
    return msgspec.structs.replace(kept, source="`tollgate login`")


def keep_login(address: Address, env: Mapping[str, str] = os.environ) -> Path:
    """Keep a gateway and its keys, readable by their owner alone; return where."""
    path = login_file(env)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_privately(path, msgspec.json.encode(msgspec.structs.replace(address, source="")))
    return path


def _of_this_folder() -> Address | None:
    try:
        kept = msgspec.json.decode(LOCAL_SECRETS.read_bytes(), type=_StackSecrets)
    except (OSError, msgspec.DecodeError):
        return None
    if kept.port is None:
        return None
    url = f"http://127.0.0.1:{kept.port}"
    return Address(url=url, team_key=kept.team_key, admin_key=kept.admin_key, source="`tollgate dev` in this folder")
