# A moderator as gateways have it, with the policy of a test, and calls for it to look at. Redis and Postgres are away:
# what it counts stays here.

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.calls.call import Call
from gateway.core.background import Background
from gateway.core.principals import Caller, Team
from gateway.core.settings import Safety
from gateway.moderation.abuse import AbuseWatch
from gateway.moderation.checker import OutsideChecker
from gateway.moderation.classifier.classifier import Classifier
from gateway.moderation.moderator import Moderator
from gateway.moderation.policy_events import PolicyEvents
from gateway.storage.database import Database
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.client import UpstreamClient
from protocol.chat import ChatRequest, Message
from protocol.inference import Request
from router import RoutingOptions
from tests.support.clock import SetClock

NOWHERE = "postgresql+asyncpg://nobody@127.0.0.1:1/none"
HELLO = ChatRequest(model="small", messages=(Message(role="user", content="What is the capital of Peru?"),))
BLOCKS = Safety(input="block", output="block")


class Guarding:
    """A moderator and what it counts with, without the encoder unless that is asked for. Made inside a running event
    loop; ``close`` it."""

    def __init__(self, house: Safety = BLOCKS) -> None:
        self.clock, self.background, metrics = SetClock(), Background(), Metrics()
        self._database, self._client = Database(NOWHERE), UpstreamClient()
        self.abuse = AbuseWatch(Redis(port=1), self.clock, self.background)
        self.events = PolicyEvents(self._database)
        checker = OutsideChecker(self._client, metrics)
        house = replace(house, reader=house.reader or "off")
        self.moderator = Moderator(house, _CLASSIFIER, self.events, self.abuse, checker, metrics)

    def call(self, request: Request = HELLO, **more: Any) -> Call:
        """Return a call of one key."""
        return Call(
            request_id=self.clock.new_id(),
            caller=Caller(team=Team(id="team_a", name="A"), key_id="key_a"),
            endpoint="chat.completions",
            request=request,
            routing=RoutingOptions(),
            created_at=self.clock.now(),
            started=0.0,
            **more,
        )

    async def close(self) -> None:
        """Let go of everything."""
        await self.moderator.close()
        await self.background.drain(5)
        await self._client.close()
        await self._database.close()


_CLASSIFIER = Classifier.load()
