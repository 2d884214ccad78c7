# When a stream says a comment, and when it does not.

from __future__ import annotations

import asyncio
import time
from typing import Any

from gateway.http.stream_sender import COMMENT, StreamSender

SILENCE = 0.02


class Heard:
    """A client that writes down what it is told; ``is_slow`` while it takes nothing."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def send(self, message: dict[str, Any]) -> None:
        """Take one message, when it may."""
        await self.may_go_on.wait()
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        """What came after the head."""
        return [message["body"] for message in self.messages[1:]]


def test_a_stream_that_speaks_is_not_interrupted() -> None:
    """No comment where words come often enough; the body ends once."""

    async def scene() -> None:
        heard = Heard()
        sender = StreamSender(heard.send, 10.0)
        await sender.begin([(b"x-a", b"b")])
        await sender.send(b"1")
        await sender.send(b"2", is_last=True)
        sender.close()
        await sender.end()

        assert heard.bodies == [b"1", b"2"]
        assert [message.get("more_body") for message in heard.messages] == [None, True, False]
        assert heard.messages[0]["headers"][-1] == (b"x-a", b"b")

    asyncio.run(scene())


def test_a_silent_stream_says_comments_between_its_words() -> None:
    """Several, if need be, and the head before the first."""

    async def scene() -> None:
        heard = Heard()
        sender = StreamSender(heard.send, SILENCE)
        while heard.bodies.count(COMMENT) < 2:
            await asyncio.sleep(SILENCE)
        begun = sender.has_begun
        await sender.begin([(b"x-late", b"too late")])
        await sender.send(b"1")
        await sender.end()
        sender.close()

        assert begun
        assert [message["type"] for message in heard.messages].count("http.response.start") == 1
        assert heard.messages[0]["type"] == "http.response.start"
        assert [body for body in heard.bodies if body != COMMENT] == [b"1", b""]

    asyncio.run(scene())


def test_a_client_that_takes_nothing_gets_one_comment_at_the_most() -> None:
    """They do not pile up, and what follows comes after."""

    async def scene() -> None:
        heard = Heard()
        sender = StreamSender(heard.send, SILENCE)
        await sender.begin([])
        heard.may_go_on.clear()
        await asyncio.sleep(10 * SILENCE)
        sending = asyncio.create_task(sender.send(b"1", is_last=True))
        await asyncio.sleep(0)
        heard.may_go_on.set()
        await sending
        sender.close()

        assert heard.bodies == [COMMENT, b"1"]

    asyncio.run(scene())


def test_no_comment_comes_after_the_end() -> None:
    """Though one is due in the very moment in which the client takes the one before, and the end waits for that."""

    async def scene() -> None:
        heard = Heard()
        sender = StreamSender(heard.send, SILENCE)
        await sender.begin([])
        heard.may_go_on.clear()
        while sender._comment is None:
            await asyncio.sleep(SILENCE)
        sending = asyncio.create_task(sender.send(b"1", is_last=True))
        await asyncio.sleep(0)
        heard.may_go_on.set()
        time.sleep(2 * SILENCE)  # the loop stands still, and then everything is due
        await sending
        await asyncio.sleep(5 * SILENCE)
        sender.close()

        assert heard.bodies[-1] == b"1" and heard.bodies.count(b"1") == 1

    asyncio.run(scene())


def test_nothing_is_said_after_the_close() -> None:
    """Somebody else answers then, with a status of its own."""

    async def scene() -> None:
        heard = Heard()
        sender = StreamSender(heard.send, SILENCE)
        sender.close()
        await asyncio.sleep(5 * SILENCE)

        assert heard.messages == []

    asyncio.run(scene())
