"""A headless Chromium that a test drives by the DevTools protocol, through pipes."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LONGEST_WAIT = 30.0
"""Seconds until a condition of a page must hold."""


class Page:
    """A page of a browser.

    Args:
        to_browser: descriptor that the browser reads commands from.
        from_browser: descriptor that the browser writes answers and events to.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._session, self._rest = 0, None, b""
        self.events: list[dict[str, Any]] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> Any:
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            self._rest += os.read(self._from, 1 << 16)
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in JavaScript."""
        result = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + LONGEST_WAIT
        while not self.evaluate(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.05)

    def open(self, url: str, width: int, *, dark: bool = False) -> None:
        """Open a page in a window of a width in pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=844, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({url!r}) && document.readyState == 'complete'")

    def requests(self) -> list[str]:
        """Return the addresses that the page has requested."""
        sent = (e for e in self.events if e.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def errors(self) -> list[dict[str, Any]]:
        """Return uncaught exceptions and entries of the log, such as refused scripts."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in kinds]


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """Start Chromium with a profile in a folder."""
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()

    def redirect() -> None:  # the protocol's descriptors are 3 and 4
        commands, answers = os.dup(read_commands), os.dup(write_answers)
        os.dup2(commands, 3)
        os.dup2(answers, 4)

    process = subprocess.Popen(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         f"--user-data-dir={folder}"],
        preexec_fn=redirect, close_fds=False, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=os.environ | {"HOME": str(folder)},
    )  # fmt: skip
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Page(write_commands, read_answers)
    finally:
        os.close(write_commands)  # ends the browser
        process.wait(30)
        os.close(read_answers)
