"""A headless Chromium, driven by its DevTools protocol: for pictures of the docs, tests and benches of pages.

Only aiohttp is needed, which hpcrl requires; Debian's package ``chromium`` has the program.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_LISTENS = re.compile(rb"DevTools listening on (ws://\S+)")
_START_S = 120.0
_BETWEEN_PAGES = ("Inspected target navigated", "Cannot find context")
"""Errors of a page that is gone, when another one comes."""
_ANSWER_S = 270.0
_MAX_MESSAGE = 256 << 20


def find_chromium() -> str | None:
    """Return the path of the program; None where it is not installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name)) is not None), None)


class Page:
    """An open page.

    Attributes
    ----------
    messages:
        Errors and warnings of its console, and exceptions.
    requests:
        Addresses of all that it fetched, its own among them.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._socket, self._session = socket, session
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol (RuntimeError where it fails)."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "sessionId": self._session, "method": method, "params": parameters}
        await self._socket.send_json(message)
        async with asyncio.timeout(_ANSWER_S):
            answer = await self._answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of the promise that it is (RuntimeError where it throws)."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(
        self, place: Path | str, wait_for: str = "document.documentElement.dataset.state === 'drawn'"
    ) -> None:
        """Open a file, or an address, and wait until an expression is true."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        # keys go to a page that has the focus, which no window of a headless browser gets
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        url = place if isinstance(place, str) else place.resolve().as_uri()
        await self.call("Page.navigate", url=url)
        await self.wait_for(f"document.readyState === 'complete' && ({wait_for})")

    async def wait_for(self, expression: str) -> None:
        """Wait until an expression is true; the page may load itself anew meanwhile."""
        async with asyncio.timeout(_ANSWER_S):
            while not await self._is_true(expression):
                await asyncio.sleep(0.05)

    async def _is_true(self, expression: str) -> bool:
        try:
            return bool(await self.evaluate(f"Boolean({expression})"))
        except RuntimeError as error:
            if any(words in str(error) for words in _BETWEEN_PAGES):
                return False
            raise

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key, by its name, its Windows key code, and the text that it types."""
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def picture(self) -> bytes:
        """Return what the window shows as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            parameters = event.get("params", {})
            if "id" in event:
                waiting = self._answers.pop(event["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.messages.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                self.messages.append(f"{parameters['type']}: {[a.get('value') for a in parameters['args']]}")
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                self.messages.append(f"log: {parameters['entry']['text']}")
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    async def close(self) -> None:
        """Stop reading."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader


@contextlib.asynccontextmanager
async def chromium_page(more: Sequence[str] = ()) -> AsyncIterator[Page]:
    """Start a Chromium of its own with an empty page, and end it afterwards.

    Parameters
    ----------
    more:
        Further options of the program.

    Raises
    ------
    FileNotFoundError
        It is not installed.
    """
    program = find_chromium()
    if program is None:
        raise FileNotFoundError("chromium is not installed (apt-get install chromium)")
    options = ["--headless=new", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu", "--hide-scrollbars"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", *more]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium refuses to start as root with it
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *options,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile},
        )
        drain: asyncio.Task[None] | None = None
        try:
            address = await _address(process)
            drain = asyncio.create_task(_drain(process))
            async with (
                aiohttp.ClientSession() as client,
                client.ws_connect(address, max_msg_size=_MAX_MESSAGE) as socket,
            ):
                await socket.send_json({"id": 0, "method": "Target.createTarget", "params": {"url": "about:blank"}})
                target = (await _answer(socket, 0))["targetId"]
                attach = {"targetId": target, "flatten": True}
                await socket.send_json({"id": 0, "method": "Target.attachToTarget", "params": attach})
                page = Page(socket, (await _answer(socket, 0))["sessionId"])
                try:
                    yield page
                finally:
                    await page.close()
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(10):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
            if drain is not None:
                await drain


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    lines = b""
    async with asyncio.timeout(_START_S):
        while line := await process.stderr.readline():
            if match := _LISTENS.search(line):
                return match[1].decode()
            lines += line
    raise RuntimeError(f"chromium ended: {lines[-2000:].decode(errors='replace')}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.read(65536):
        pass


async def _answer(socket: aiohttp.ClientWebSocketResponse, number: int) -> dict[str, Any]:
    while True:
        message = await socket.receive_json()
        if message.get("id") == number:
            return message["result"]
