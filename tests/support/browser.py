# A headless Chromium, steered over a pipe in its own protocol (CDP): what a reader of the console sees and does, and
# what the browser objects to. Nothing but an installed Chromium is needed.

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-quic", "--hide-scrollbars", "--mute-audio", "--remote-debugging-pipe"),
)
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " ")}
WITHIN = 15.0  # seconds until what is waited for shows
PATIENCE = 60.0  # seconds for the browser to answer: a look by axe takes long on a busy machine
READY = "Boolean(document.querySelector('#app[aria-busy=false] main h1 + *'))"  # a view of the console, with its data


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser, or skip the test where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("SKIPPED: Chromium is not installed (apt-get install chromium); the console was not shown")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(program, profile) as running:
        yield running


class Browser:
    """One process of Chromium; its pages share nothing but the process."""

    def __init__(self, program: str, profile: str) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._answers: dict[int, Any] = {}
        self._pages: dict[str, Page] = {}
        self._came = threading.Condition()
        self._last = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError, TimeoutError):
            self.ask("Browser.close")
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)

    def page(self, width: int = 1280, height: int = 800, *, is_dark: bool = False) -> Page:
        """Open a page with storage of its own."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        page.resize(width, height, is_dark=is_dark)
        return page

    def ask(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Send a command and return its result."""
        with self._came:
            self._last += 1
            number = self._last
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        with self._came:
            if not self._came.wait_for(lambda: number in self._answers, PATIENCE):
                raise TimeoutError(method)
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _listen(self) -> None:
        rest = b""
        while block := os.read(self._read, 1 << 16):
            *messages, rest = (rest + block).split(b"\0")
            for message in map(json.loads, messages):
                with self._came:
                    if "id" in message:
                        self._answers[message["id"]] = message
                    elif (page := self._pages.get(message.get("sessionId"))) is not None:
                        page.hear(message["method"], message["params"])
                    self._came.notify_all()
        os.close(self._read)


class Page:
    """A tab: what it asked for, what went wrong in it, and the reader's hands."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.asked: list[str] = []  # URLs, in their order
        self.faults: list[str] = []  # uncaught errors, and what a policy forbade

    def ask(self, method: str, **params: Any) -> Any:
        """Send a command to this page."""
        return self._browser.ask(method, self._session, **params)

    def close(self) -> None:
        """Close the tab."""
        self._browser.ask("Target.closeTarget", targetId=self._target)

    def hear(self, method: str, params: Any) -> None:
        """Note what the browser tells."""
        if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith("data:"):
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Log.entryAdded" and params["entry"]["source"] in ("security", "violation"):
            self.faults.append(params["entry"]["text"])

    def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Make the window so wide and high, in pixels, in one colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to an address."""
        self.ask("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def look(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, within: float = WITHIN) -> Any:
        """Wait until an expression is true of the page, and return it."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            with suppress(AssertionError):  # the page is changing
                if found := self.look(expression):
                    return found
            time.sleep(0.03)
        raise AssertionError(f"not within {within} s: {expression}\n{self.faults}\n{self.text()}")

    def text(self) -> str:
        """Return all that can be read, with single spaces."""
        return " ".join(str(self.look("document.body.innerText")).split())

    def wait_text(self, words: str) -> None:
        """Wait until words can be read."""
        self.wait(f"document.body.innerText.replace(/\\s+/g, ' ').includes({json.dumps(words)})")

    def click(self, words: str, among: str = "button, a") -> None:
        """Click on what reads, or is named, so."""
        named = f"(each.innerText.trim() === {json.dumps(words)} || each.ariaLabel === {json.dumps(words)})"
        found = f"[...document.querySelectorAll({json.dumps(among)})].find((each) => {named})"
        self.wait(f"Boolean({found})")
        self.look(f"{found}.click()")

    def fill(self, selector: str, words: str) -> None:
        """Type words into a field, in place of what is there."""
        self.wait(f"Boolean(document.querySelector({json.dumps(selector)}))")
        self.look(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.type(words)

    def type(self, words: str) -> None:
        """Type words where the focus is."""
        self.ask("Input.insertText", text=words)

    def press(self, key: str) -> None:
        """Press a key."""
        code, text = KEYS[key]
        shared = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **shared)

    def picture(self, path: Path) -> None:
        """Keep what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))
