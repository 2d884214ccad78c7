# The spine of a call: the files that architecture.md names under "One call", in the order in which a call enters them;
# and how deep it stands when its upstream is asked.

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from openai import OpenAI

from gateway.http.direct import Direct
from gateway.http.reply_response import ReplyResponse
from gateway.upstreams.client import UpstreamClient

ROOT = Path(__file__).parents[2]
MOST_FILES = 14
MOST_FRAMES = 8
SECTION = re.compile(r"^## One call\n(.*?)^## ", re.MULTILINE | re.DOTALL)
SPINE = re.findall(
    r"^\| `([\w/]+\.py)` \|", SECTION.findall((ROOT / "docs/architecture.md").read_text())[0], re.MULTILINE
)


class Trace:
    """What runs in one thread between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}  # in the order of their first entry
        self.frames: list[str] = []  # from the response to the client of upstreams, when that was entered

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Take in one event of the profiler."""
        if event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            self.files.setdefault(str(path.relative_to(ROOT)))
        if frame.f_code is UpstreamClient.send.__code__ and not self.frames:
            above = frame.f_back
            while above is not None:
                self.frames.append(above.f_code.co_qualname)
                if above.f_code is ReplyResponse.__call__.__code__:
                    break
                above = above.f_back


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_call_runs_along_the_spine(openai: OpenAI, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader follows a call through few files, each entered in its turn, and few frames deep."""
    ask: Any = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "stream": stream}
    answer, trace = Direct._answer, Trace()

    async def traced(*args: Any) -> None:
        sys.setprofile(trace.note)
        try:
            await answer(*args)
        finally:
            sys.setprofile(None)

    for is_traced in (False, True):  # a process's first call reads what later ones have at hand
        if is_traced:
            monkeypatch.setattr(Direct, "_answer", traced)
        replied = openai.chat.completions.create(**ask)
        for _ in replied if stream else ():
            pass

    assert len(SPINE) == MOST_FILES
    assert [path for path in trace.files if path in SPINE] == SPINE
    assert len(trace.frames) <= MOST_FRAMES, trace.frames
