"""A real headless Chromium, driven over its DevTools protocol on a pipe: no driver, no socket."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions"),
    *("--hide-scrollbars", "--mute-audio", "--disable-component-update"),
)


class Tab:
    """One page. ``problems`` collects what its console, its scripts and its policy complain of."""

    def __init__(self, reader: asyncio.StreamReader, out: int) -> None:
        self._reader, self._out = reader, out
        self._number, self._session = 0, ""
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.urls: list[str] = []

    async def listen(self) -> None:
        while message := (await self._reader.readuntil(b"\0"))[:-1]:
            self._take(json.loads(message))

    def _take(self, told: dict[str, Any]) -> None:
        if "id" in told:
            waiting = self._answers.pop(told["id"])
            if not waiting.done():
                waiting.set_result(told)
            return
        parameters = told["params"]
        match told["method"]:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.problems.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.urls.append(parameters["request"]["url"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        waiting = self._answers[self._number] = asyncio.get_running_loop().create_future()
        os.write(self._out, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(60):
            answer = await waiting
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        session = await self.call("Target.attachToTarget", flatten=True, **target)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

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


@contextlib.asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Tab]:
    """One tab of a browser that starts with the block and ends with it."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    root = ("--no-sandbox",) if os.geteuid() == 0 else ()
    command = [str(CHROMIUM), *_FLAGS, *root, f"--user-data-dir={folder}", "about:blank"]
    # Chromium reads its commands from descriptor 3 and answers on 4.
    script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script, "bash", *command),
        pass_fds=(to_browser, from_browser),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": str(folder), "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
    )
    os.close(to_browser)
    os.close(from_browser)
    reader = asyncio.StreamReader(limit=64 << 20)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers, "rb")
    )
    tab = Tab(reader, commands)
    listening = asyncio.create_task(tab.listen())
    try:
        await tab.open()
        yield tab
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # the group that was started above
        await process.wait()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        transport.close()
        os.close(commands)
