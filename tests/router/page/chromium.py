"""A real headless Chromium, driven over its DevTools protocol on a pipe: no driver, no socket."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions"),
    *("--hide-scrollbars", "--mute-audio", "--disable-component-update"),
)


class Tab:
    """The page of a test. Each router is an origin, so that no test sees another one's storage.

    Attributes:
        problems: What its console, its scripts and its policy complain of.
        absent: Paths of the router that this fleet does not have: a 404 of them is no problem.
        urls: What it has asked for.
    """

    def __init__(self, browser: "Browser") -> None:
        self._browser = browser
        self._loop = asyncio.get_running_loop()
        self._session = ""
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.absent: set[str] = set()
        self.urls: list[str] = []

    def take(self, told: dict[str, Any]) -> None:
        """Take a message of the browser, in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, told)

    def _take(self, told: dict[str, Any]) -> None:
        if "id" in told:
            waiting = self._answers.pop(told["id"], None)  # None: another tab's
            if waiting is not None and not waiting.done():
                waiting.set_result(told)
            return
        if told.get("sessionId") != self._session:
            return
        parameters = told["params"]
        match told["method"]:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                url = parameters["entry"].get("url", "")
                if urlsplit(url).path not in self.absent:
                    self.problems.append(f"{parameters['entry']['text']} {url}")
            case "Network.requestWillBeSent":
                self.urls.append(parameters["request"]["url"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._browser.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        waiting = self._answers[number] = self._loop.create_future()
        self._browser.send(json.dumps(message).encode())
        async with asyncio.timeout(60):
            answer = await waiting
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def open(self) -> None:
        targets = (await self.call("Target.getTargets"))["targetInfos"]
        (page,) = (one["targetId"] for one in targets if one["type"] == "page")
        session = await self.call("Target.attachToTarget", flatten=True, targetId=page)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def close(self) -> None:
        await self.call("Page.navigate", url="about:blank")
        session, self._session = self._session, ""
        await self.call("Target.detachFromTarget", sessionId=session)

    async def go(self, url: str) -> None:
        """Open a page and wait until its scripts have run."""
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def js(self, expression: str) -> Any:
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Wait until a JavaScript expression is true."""
        async with asyncio.timeout(timeout_s):
            while not (found := await self.js(expression)):
                await asyncio.sleep(0.1)
        return found

    async def key(self, name: str) -> None:
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[name]
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    async def show_as(self, width: int, height: int, scheme: str) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    async def screenshot(self) -> bytes:
        """What the window shows, as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


class Browser:
    """A browser with one tab, which one test after another uses.

    A browser, or only a profile, for each test took a second of a core.
    """

    def __init__(self, folder: Path) -> None:
        to_browser, self._commands = os.pipe()
        self._told, from_browser = os.pipe()
        root = ("--no-sandbox",) if os.geteuid() == 0 else ()
        command = [str(CHROMIUM), *_FLAGS, *root, f"--user-data-dir={folder}", "about:blank"]
        # Chromium reads its commands from descriptor 3 and answers on 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ("bash", "-c", script, "bash", *command),
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": str(folder), "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
        )
        os.close(to_browser)
        os.close(from_browser)
        self.numbers = itertools.count(1)
        self._tab: Tab | None = None
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        begun = b""
        while part := os.read(self._told, 1 << 20):
            *messages, begun = (begun + part).split(b"\0")
            for message in messages:
                if (tab := self._tab) is not None:
                    tab.take(json.loads(message))

    def send(self, message: bytes) -> None:
        os.write(self._commands, message + b"\0")

    @contextlib.asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """Return the tab as a new one: what it shows and what it was told is gone afterwards."""
        tab = self._tab = Tab(self)
        try:
            await tab.open()
            yield tab
            await tab.close()
        finally:
            self._tab = None

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)  # the group that was started above
        self._process.wait()
        self._listening.join(10)
        os.close(self._told)
        os.close(self._commands)
