# Streams that OpenAI's and Anthropic's packages for Python keep for their own tests, most of them recorded (`git clone`
# openai/openai-python and anthropics/anthropic-sdk-python into PEERS): our formats read what the packages read.

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.recordings import Recorded, read_recorded

PEERS = Path(os.environ.get("PEERS", "."))
OPENAI = sorted((PEERS / "openai-python" / ".inline-snapshot" / "external").glob("*.bin"))
ANTHROPIC = sorted((PEERS / "anthropic-sdk-python" / "tests").rglob("fixtures/**/*.*"))

pytestmark = pytest.mark.peers


def answering(http: Any, body: bytes) -> Any:
    """Return a client of httpx, or of its successor, to which ``body`` is answered."""
    answer = http.Response(200, headers={"content-type": "text/event-stream"}, content=body)
    return http.Client(transport=http.MockTransport(lambda _: answer))


@pytest.mark.skipif(not OPENAI, reason="SKIPPED: clone openai/openai-python into PEERS")
def test_openais_streams_are_read_as_its_package_reads_them() -> None:
    """Words, refusals, calls, why each choice ends; a stream means the same in single bytes."""
    from openai import OpenAI

    for file in OPENAI:
        body = file.read_bytes()
        with OpenAI(base_url="http://test/v1", api_key="k", http_client=answering(httpx, body)) as client:
            with client.chat.completions.stream(model="m", messages=[]) as stream:
                theirs = stream.until_done().current_completion_snapshot
        ours, usage = read_recorded("openai", Recorded(file.name, "api.openai.com", 200, body))

        assert [_said(choice) for choice in ours.choices] == [_said(choice) for choice in theirs.choices], file.name
        assert theirs.usage is None or (usage is not None and usage.total_tokens == theirs.usage.total_tokens), (
            file.name
        )


def _said(choice: Any) -> Any:
    message = choice.message
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", message.refusal or "", calls, choice.finish_reason


@pytest.mark.skipif(not ANTHROPIC, reason="SKIPPED: clone anthropics/anthropic-sdk-python into PEERS")
def test_anthropics_streams_are_read_as_its_package_reads_them() -> None:
    """Words, thoughts, calls, counts."""
    import httpx2
    from anthropic import Anthropic

    for file in ANTHROPIC:
        body = file.read_bytes()
        with Anthropic(base_url="http://test", api_key="k", http_client=answering(httpx2, body)) as client:
            with client.beta.messages.stream(model="m", max_tokens=9, messages=[]) as stream:
                theirs = stream.get_final_message()
        ours, usage = read_recorded("anthropic", Recorded(file.name, "api.anthropic.com", 200, body))
        message = ours.choices[0].message
        blocks = {
            kind: [each for each in theirs.content if each.type == kind] for kind in ("text", "thinking", "tool_use")
        }

        assert (message.content or "") == "".join(each.text for each in blocks["text"]), file.name
        assert (message.reasoning_content or "") == "".join(each.thinking for each in blocks["thinking"]), file.name
        assert [call.id for call in message.tool_calls or ()] == [each.id for each in blocks["tool_use"]], file.name
        assert usage is not None and usage.output_tokens == theirs.usage.output_tokens, file.name
