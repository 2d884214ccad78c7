# An outside checker for tests: answers as OpenAI's moderation API does, or chats as a Llama Guard, when and how it is
# told.

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.waiting import until


@dataclass
class ScriptedChecker:
    """What it says of the next texts, and what it was sent."""

    url: str = ""
    flags: bool = False
    waits_for: Callable[[], object] = lambda: True  # what must hold before it answers
    delay: float = 0.0  # seconds from then on
    status: int = 200
    verdict: str = ""  # of a Llama Guard, in place of what ``flags`` says
    texts: list[str] = field(default_factory=list)  # of a chat each turn, with its role

    def calm(self) -> None:
        """Find nothing wrong from now on, at once."""
        self.flags, self.waits_for, self.delay, self.status, self.verdict = False, lambda: True, 0.0, 200, ""


@contextmanager
def scripted_checker() -> Iterator[ScriptedChecker]:
    """Run a checker until the end of the block."""
    checker = ScriptedChecker()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            asked = json.loads(body)
            turns = [f"{turn['role']}: {turn['content']}" for turn in asked.get("messages", ())]
            checker.texts += turns or [asked["input"]]
            flags, status = checker.flags, checker.status
            until(checker.waits_for)
            time.sleep(checker.delay)
            said = {"content": checker.verdict or ("unsafe\nS1,S10" if flags else "safe")}
            result = {"flagged": flags, "categories": {"house rules": flags}}
            answer = json.dumps({"choices": [{"message": said}]} if turns else {"results": [result]}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    checker.url = f"http://127.0.0.1:{server.server_port}/v1/moderations"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield checker
    finally:
        server.shutdown()
        server.server_close()
