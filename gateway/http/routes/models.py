# GET /v1/models and /v1/models/{id}: what a team may ask for.

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from litestar import Response, get
from litestar.params import FromPath

from gateway.accounts.guards import team_or_admin_guard
from gateway.accounts.serializers import price_view
from gateway.core.principals import Admin, Caller
from gateway.dialects.anthropic_errors import ANTHROPIC_ERRORS
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, answer, part_of, principal_of
from gateway.inference.edition import Edition
from gateway.overload.read_limit import StoredLimit
from gateway.storage.readiness import Readiness
from gateway.upstreams.team_keys import models_open_to
from router.catalog.catalog import Catalog
from router.catalog.errors import UnknownModel


@get("/v1/models", guards=[team_or_admin_guard], summary="List the models")
async def list_models(request: AnyRequest) -> Response[bytes]:
    """List every name that this caller may ask for: models, automatic routes, aliases."""
    edition = edition_of(request)
    started = int(part_of(request, Readiness).started_at)
    names = _allowed_names(edition, _reader(request))
    if ANTHROPIC_ERRORS.client_header in request.headers:
        data = [_anthropic_model(edition.catalog, name, started) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        return answer({"data": data, "has_more": False, **ends})
    return answer({"object": "list", "data": [_model_object(edition.catalog, name, started) for name in names]})


@get("/v1/models/{model:path}", guards=[team_or_admin_guard], summary="Show a model")
async def show_model(request: AnyRequest, model: FromPath[str]) -> Response[bytes]:
    """Show one name that this caller may ask for."""
    edition = edition_of(request)
    name = model.removeprefix("/")
    if name not in _allowed_names(edition, _reader(request)):
        raise UnknownModel(f"The model '{name}' does not exist or you do not have access to it.", param="model")
    shape = _anthropic_model if ANTHROPIC_ERRORS.client_header in request.headers else _model_object
    return answer(shape(edition.catalog, name, int(part_of(request, Readiness).started_at)))


def _reader(request: AnyRequest) -> Caller | Admin:
    """Return who reads. A team's reading is counted. Raises RateLimited."""
    principal = principal_of(request)
    if isinstance(principal, Caller):
        part_of(request, StoredLimit).take(principal.team.id)
    return principal


def _allowed_names(edition: Edition, caller: Caller | Admin) -> list[str]:
    catalog, names = edition.catalog, list(edition.catalog.names())
    if isinstance(caller, Admin):
        return names
    with_keys = models_open_to(caller.team, catalog, edition.providers)
    for allowed in (caller.team.allowed_models, caller.key_models, with_keys):
        if allowed is not None:
            its_own = set(_names_by(catalog, allowed))
            names = [name for name in names if name in its_own]
    return names


def _names_by(catalog: Catalog, allowed: frozenset[str]) -> list[str]:
    autos = [name for name, auto in catalog.auto.items() if allowed & {name, *auto.small, *auto.large}]
    usable = allowed.union(autos)
    aliases = [name for name in catalog.aliases if not usable.isdisjoint((name, catalog.meaning(name)))]
    return [*(name for name in catalog.models if name in allowed), *autos, *aliases]


def _model_object(catalog: Catalog, name: str, started: int) -> dict[str, Any]:
    meant = catalog.aliases.get(name, name)
    spec = catalog.models.get(meant)
    shown: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": spec.provider if spec else "tollgate",
    }
    if spec is not None:
        shown |= {"context": spec.context, "max_output": spec.max_output, "abilities": sorted(spec.capabilities)}
        shown |= {"price": price_view(spec.price)} | ({"note": spec.note} if spec.note else {})
    if meant != name:
        shown["alias_of"] = meant
    return shown


def _anthropic_model(catalog: Catalog, name: str, started: int) -> dict[str, Any]:
    """Return a model as Anthropic's clients read it."""
    spec = catalog.models.get(catalog.meaning(name))
    shown: dict[str, Any] = {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": f"{datetime.fromtimestamp(started, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
    }
    return shown | ({"max_input_tokens": spec.context, "max_tokens": spec.max_output} if spec is not None else {})
