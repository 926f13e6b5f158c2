"""A headless Chromium for tests, driven over its debugging pipe: no driver, no port, no package."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0
EXEC = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes Chromium, which reads commands from descriptor 3 and answers on 4."""


def find_chromium() -> str | None:
    """`$CHROMIUM`, or the first that is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. Clicks are real ones: the mouse is moved and pressed at the middle of an element."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._id, self._rest = read, write, 0, b""
        self.session: str | None = None
        self.logged: list[str] = []
        self.requested: list[str] = []
        """What was logged as an error, and the addresses that were loaded."""

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Runs a command of the DevTools protocol and returns its result."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], PATIENCE)[0]:
                raise TimeoutError(f"Chromium has said nothing for {PATIENCE:.0f} s")
            more = os.read(self._read, 1 << 16)
            if not more:
                raise RuntimeError("Chromium has gone")
            self._rest += more
        one, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(one)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.logged.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.logged.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
        return message

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        result = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(script):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.02)

    def open(self, path: Path, hash: str = "") -> None:
        """Loads a file and waits until its scripts have run."""
        self.command("Page.navigate", url="about:blank")
        self.wait_for("location.href === 'about:blank'")
        self.requested.clear()
        self.command("Page.navigate", url=path.resolve().as_uri() + hash)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of the first element that fits, scrolled into view."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        return x, y

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def hover(self, selector: str) -> None:
        self.mouse("mouseMoved", *self.place(selector))

    def click(self, selector: str) -> None:
        x, y = self.place(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)
        self.settle()

    def settle(self) -> None:
        """Waits for two frames: by then what watches sizes has drawn anew."""
        frame = "requestAnimationFrame"
        self.evaluate(f"new Promise(done => {frame}(() => {frame}(done)))")

    def type(self, selector: str, text: str) -> None:
        self.click(selector)
        self.command("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """An option of a select, as choosing it does: its list is no part of the page."""
        self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            f"e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})()"
        )

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the window and the scheme that the person prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        found = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Page]:
    """A page in a Chromium of its own."""
    from_us, to_chrome = os.pipe()
    from_chrome, to_us = os.pipe()
    flags = [
        "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
        "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
        "--disable-component-update",
    ]  # fmt: skip
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to start for root
    process = subprocess.Popen(
        [sys.executable, "-c", EXEC, str(from_us), str(to_us), executable, *flags],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        page = Page(from_chrome, to_chrome)
        target = page.command("Target.createTarget", url="about:blank")["targetId"]
        attached = page.command("Target.attachToTarget", targetId=target, flatten=True)
        page.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.command(f"{domain}.enable")
        yield page
    finally:
        os.close(to_chrome)
        os.close(from_chrome)
        process.terminate()
        process.wait(timeout=PATIENCE)
