"""A headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 30.0
_SIZE = 1200, 700
# Chromium reads commands from descriptor 3 and writes answers to 4.
_LAUNCHER = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless",
    # Tests may run as root, in containers with a small /dev/shm.
    *("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"),
    *("--remote-debugging-pipe", "--hide-scrollbars"),
)


def executable() -> str | None:
    """Return the browser's path, if one is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A page in a browser, and the errors that it reported."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._rest = 0, b""
        self._session: str | None = None
        self.errors: list[str] = []
        # The addresses that the page asked for since it was opened.
        self.requests: list[str] = []
        self._seen: set[str] = set()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.send(f"{domain}.enable")
        self._resize(*_SIZE)

    def _resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    @contextmanager
    def sized(self, width: int, height: int) -> Iterator[None]:
        """Give the window another size."""
        self._resize(width, height)
        try:
            yield
        finally:
            self._resize(*_SIZE)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive(method)).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    def _receive(self, awaited: str) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer {awaited} within {SECONDS} s"
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        method, params = message.get("method", ""), message.get("params", {})
        self._seen.add(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        serious = params.get("type") == "error" or params.get("entry", {}).get("level") == "error"
        if method == "Runtime.exceptionThrown" or serious:
            self.errors.append(json.dumps(params))
        return message

    def open(self, page: Path | str) -> None:
        """Open a file or an address, and wait until it is drawn."""
        self._seen.clear()
        self.requests.clear()
        self.send("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._receive("Page.navigate")
        self.settle()

    def settle(self) -> None:
        """Wait until the page has drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of its promise."""
        params = {"expression": script, "returnByValue": True, "awaitPromise": True}
        result = self.send("Runtime.evaluate", **params)
        assert "exceptionDetails" not in result, (script, result)
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move the mouse or turn its wheel, at a place of the window."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, name: str) -> None:
        """Press a key."""
        text = {"text": name} if len(name) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def browse() -> Iterator[Browser]:
    """Start a browser, and end it."""
    found = executable()
    assert found is not None
    theirs, commands = os.pipe()
    answers, their_answers = os.pipe()
    # Chromium may still write to its folder while it ends.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        launcher = [sys.executable, "-c", _LAUNCHER, str(theirs), str(their_answers)]
        process = subprocess.Popen(
            [*launcher, found, *_FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(theirs, their_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(their_answers)
        try:
            yield Browser(commands, answers)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(commands)
            os.close(answers)
