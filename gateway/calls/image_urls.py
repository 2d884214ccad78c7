# Where the images of a request may lie. An upstream fetches them by itself, from its own network: for a self-hosted
# engine a URL can reach its metadata service, its files and its neighbours. So only https URLs of public addresses
# go there, and data URLs; model makers that fetch from their own networks get every URL as it is.

from __future__ import annotations

import asyncio
from functools import lru_cache
from urllib.parse import urlsplit

from msgspec.structs import replace

from gateway.egress.destinations import Guard, SystemResolver, Unreachable
from gateway.egress.urls import BadUrl, CallbackUrl, read_url
from gateway.upstreams.registry import ProviderRegistry
from protocol.chat import ChatRequest
from protocol.errors import BadRequest, Overloaded, ServiceError
from protocol.inference import Request
from protocol.media.images import ImageEditRequest
from protocol.serving.off_loop import off_loop
from router.catalog.targets import Capability, Route, Target
from router.prompt_size.pictures import images_of

# Makers' own APIs, which are known to fetch images from outside the deployment. Behind any other name, public or not,
# may be a self-hosted engine.
OUTSIDE = (
    *("api.openai.com", "us.api.openai.com", "eu.api.openai.com", "api.anthropic.com", "api.mistral.ai", "api.x.ai"),
    *("generativelanguage.googleapis.com", "openrouter.ai", "api.groq.com", "api.together.xyz", "api.fireworks.ai"),
    *(".openai.azure.com", ".services.ai.azure.com", ".cognitiveservices.azure.com"),
)
MOST_HOSTS = 16  # that the images of one call may lie at
LONGEST = 16 * 1024  # characters of a URL: signed ones are long
AT_ONCE = 64  # names that are looked up
OF_A_TEAM = MOST_HOSTS  # of those
REMEMBERED_FOR = 30.0  # seconds that a host counts as public without another look-up
MOST_REMEMBERED = 4096  # hosts


class ImageUrls:
    """Decides which requests may go to which upstreams, by the images in them."""

    def __init__(self, guard: Guard | None = None) -> None:
        # Ranges that are open to callbacks are not open here: what an image shows comes back to its caller.
        self._guard = guard or Guard(resolve=SystemResolver(AT_ONCE, OF_A_TEAM), rule="images may not go")
        self._until: dict[tuple[str, int], float] = {}  # when a host that was found public is looked up again

    async def fit(self, request: Request, size: int, team_id: str, route: Route, providers: ProviderRegistry) -> Route:
        """Return the route without spares that may not be shown the images of a request of ``size`` bytes.

        Raises BadRequest where that is so of its first target, Overloaded while a name cannot be looked up.
        """
        if isinstance(request, ImageEditRequest):
            may_lie = any(picture.url for picture in request.files)
        else:
            may_lie = isinstance(request, ChatRequest) and Capability.VISION in route.targets[0].model.capabilities
        if not may_lie:
            return route
        inside = [target for target in route.targets if not is_outside(target, providers)]
        if not inside:
            return route
        try:
            await self.check(request, size, team_id)
        except ServiceError:
            if route.targets[0] in inside:
                raise
            left = tuple(target for target in route.targets if target not in inside)
            gone = {one.model.name for one in inside} - {one.model.name for one in left}
            told = {**(route.left_out or {}), **dict.fromkeys(sorted(gone), ("image_urls",))}
            return replace(route, targets=left, left_out=told or None)
        return route

    async def check(self, request: Request, size: int, team_id: str) -> None:
        """Refuse images that no self-hosted upstream may fetch. Raises BadRequest, Overloaded."""
        found = await off_loop(size, lambda: _addresses(request))
        if len(found) > MOST_HOSTS:
            raise _bad(f"The images of a request lie at {MOST_HOSTS} hosts at the most", request)
        try:
            await asyncio.gather(*(self._find(url, team_id) for url in found))
        except Unreachable as exc:
            if exc.may_pass:
                raise Overloaded("An image's host could not be looked up. Try again, or send a data URL.") from None
            raise _bad(f"The URL of an image {exc}", request) from None

    async def _find(self, url: CallbackUrl, team_id: str) -> None:
        place, now = (url.host, url.port), asyncio.get_running_loop().time()
        if self._until.get(place, 0.0) > now:
            return
        await self._guard.find(url, team_id)
        self._until.pop(place, None)  # the oldest come first
        if len(self._until) >= MOST_REMEMBERED:
            del self._until[next(iter(self._until))]
        self._until[place] = now + REMEMBERED_FOR


def is_outside(target: Target, providers: ProviderRegistry) -> bool:
    """Whether a target is known to fetch images from outside the deployment."""
    return not providers.settings(target.model.provider).self_hosted and _is_known(target.endpoint.base_url)


@lru_cache(256)
def _is_known(base_url: str) -> bool:
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    is_named = any(host.endswith(name) if name.startswith(".") else host == name for name in OUTSIDE)
    return parts.scheme == "https" and is_named


def _addresses(request: Request) -> list[CallbackUrl]:
    """Return one URL of each place where images lie that do not come along. Raises BadRequest for one that is no https
    URL."""
    found: dict[tuple[str, int], CallbackUrl] = {}
    for said in _urls(request):
        if said[:5].lower() == "data:":
            continue
        try:
            url = read_url(said, LONGEST)
        except BadUrl as exc:
            raise _bad(f"The URL of an image {exc}", request) from None
        if url.scheme != "https":
            raise _bad("The URL of an image must begin with https://", request)
        found.setdefault((url.host, url.port), url)
    return list(found.values())


def _urls(request: Request) -> list[str]:
    if isinstance(request, ImageEditRequest):
        return [picture.url for picture in request.files if picture.url]  # others came along
    return [image.url for image in images_of(request)] if isinstance(request, ChatRequest) else []


def _bad(words: str, request: Request) -> BadRequest:
    right = "Send a public https URL, or the image itself as a data URL."
    param = "messages" if isinstance(request, ChatRequest) else "images"
    return BadRequest(f"{words}. {right}", param=param, code="invalid_image_url")
