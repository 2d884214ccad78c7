# What the configuration says, and what was built of it. A call keeps the edition that it began with to its end, and
# with it models, prices and endpoints; when the configuration is read again, those that begin then get another.

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from gateway.core.settings import Settings
from gateway.inference.answer import Inference
from gateway.inference.counting import PromptCounter
from gateway.inference.idempotency import AnsweredOnce
from gateway.upstreams.registry import ProviderRegistry
from router.catalog.catalog import Catalog


class Edition(Struct, frozen=True, eq=False, kw_only=True):
    """What calls go by that begin under one reading of tollgate.yaml."""

    settings: Settings
    catalog: Catalog
    providers: ProviderRegistry
    inference: Inference
    answered_once: AnsweredOnce
    prompt_counter: PromptCounter


Build = Callable[[Settings, ProviderRegistry], Edition]
Follow = Callable[[Edition], None]
Join = Callable[[Settings], Settings]


class Editions:
    """The edition of calls that begin now, and all that goes by it."""

    def __init__(self, first: Edition, build: Build, join: Join = lambda said: said) -> None:
        """``join``: adds to what tollgate.yaml says the replicas that are found beside it."""
        self.current = first
        self.said = first.settings  # what tollgate.yaml says alone
        self._build = build
        self._join = join
        self._followers: list[Follow] = []

    def follow(self, follow: Follow) -> None:
        """Have ``follow`` called with each edition to come."""
        self._followers.append(follow)

    def change(self, settings: Settings) -> None:
        """Go by another configuration from now on, and have everything that is shared follow."""
        self._go_by(settings)
        self.said = settings

    def renew(self) -> None:
        """Go by the same configuration with the replicas that there are now."""
        self._go_by(self.said)

    def _go_by(self, said: Settings) -> None:
        settings = self._join(said)
        providers = ProviderRegistry(settings.providers, before=self.current.providers)
        edition = self._build(settings, providers)
        for follow in self._followers:
            follow(edition)
        self.current = edition  # last: calls that begin never go by what could not be followed
