# Who asks Bedrock: a key of its own goes as a bearer token; else the request is signed with credentials of AWS, which
# botocore finds (environment, profile, role of the machine) and keeps fresh. It is an extra: tollgate[bedrock].

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from gateway.upstreams.wire.errors import UpstreamError
from protocol.errors import Unshown

HOST = re.compile(r"//bedrock-runtime(?:-fips)?\.([a-z0-9-]+)\.(?:amazonaws|api)\.")


class Credentials(Unshown, Struct, frozen=True):
    """What requests are signed with."""

    access_key: str
    secret_key: str
    token: str | None = None


def region_of(base_url: str, label: str) -> str:
    """Return the region of an endpoint: its host's, else as the file calls it."""
    found = HOST.search(base_url)
    return found[1] if found else label


def find_credentials(profile: str) -> str:
    """Return the credentials of a profile, or of the environment for "", as text. Waits for the network where a role
    has to be asked. Raises UpstreamError."""
    import botocore.exceptions
    import botocore.session

    try:
        session = botocore.session.Session(profile=profile or None)
        found = session.get_credentials()
        frozen = None if found is None else found.get_frozen_credentials()
    except botocore.exceptions.BotoCoreError as exc:
        raise UpstreamError("The gateway's AWS credentials cannot be had.", outcome="refused_key") from exc
    if frozen is None or not frozen.access_key or not frozen.secret_key:
        raise UpstreamError("The gateway has no AWS credentials.", outcome="refused_key")
    told = Credentials(frozen.access_key, frozen.secret_key, frozen.token)
    return msgspec.json.encode(told).decode()


def signed(url: str, headers: Mapping[str, str], body: bytes, credentials: str, region: str) -> dict[str, str]:
    """Return ``headers`` with those that sign a POST (Signature Version 4)."""
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials as Signer

    who = msgspec.json.decode(credentials, type=Credentials)
    request = AWSRequest(method="POST", url=url, data=body, headers=dict(headers))
    SigV4Auth(Signer(who.access_key, who.secret_key, who.token), "bedrock", region).add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}
