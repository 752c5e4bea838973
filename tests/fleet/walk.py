"""Commands of a page of the guide, typed in a folder as its reader does."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from tests.fleet.test_up import wait_for

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def commands(page: str, title: str) -> list[str]:
    """Return the commands of a section: the lines that begin with a prompt."""
    section = (GUIDE / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^([A-Z]*\$ .*)$", section, re.MULTILINE)
    assert found, f"{page} has no commands in {title!r}"
    return [line.removeprefix("$ ") for line in found]


class Walk:
    """A shell of an operator. ``words`` are replaced in commands, such as names of hosts."""

    def __init__(
        self, folder: Path, words: Mapping[str, str], *, bin_folder: Path | None = None
    ) -> None:
        self.folder = folder
        self.words = words
        path = f"{bin_folder or Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("BATON_", "XDG_", "RAY_"))
            },
            "PATH": path,
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(Path.home() / ".cache"),  # weights and native code, made once
            "COLUMNS": "200",
        }
        (folder / "home").mkdir(exist_ok=True)
        self.services: list[subprocess.Popen[bytes]] = []

    def type(self, command: str, *, limit_s: float = 300, code: int = 0) -> str:
        """Run a command until it ends, `baton up` until the fleet is ready. Return its output."""
        for word, value in self.words.items():
            command = command.replace(word, value)
        if command.startswith("baton up"):
            return self._serve(command.partition(" > ")[0], limit_s)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def _serve(self, command: str, limit_s: float) -> str:
        output = self.folder / f"up-{len(self.services)}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.services.append(process)

        def ready() -> bool:
            assert process.poll() is None, output.read_text()
            return "Baton is ready at" in output.read_text()

        wait_for(ready, limit_s)
        return output.read_text()

    def end(self) -> None:
        """Stop the fleets that still run."""
        for process in self.services:
            if process.poll() is None:
                process.terminate()
        for process in self.services:
            process.wait(60)


class Load:
    """Two clients that send short requests, one after another, while commands run."""

    def __init__(self, url: str, **options: object) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._url = url
        self._options = {"timeout": 60, "trust_env": False, **options}
        self._over = threading.Event()
        self._clients = [threading.Thread(target=self._run) for _ in range(2)]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join(60)

    def _run(self) -> None:
        body = {"model": "default", "prompt": "One. " * 40, "max_tokens": 16, "ignore_eos": True}
        while not self._over.is_set():
            try:
                answer = httpx.post(f"{self._url}/v1/completions", json=body, **self._options)
            except httpx.HTTPError as error:
                self.failed.append(repr(error))
            else:
                if answer.status_code == 200:
                    self.answered += 1
                else:
                    self.failed.append(answer.text)
            time.sleep(0.05)

    def goes_on(self) -> None:
        """Wait for ten more answers; none may have failed."""
        before = self.answered
        wait_for(lambda: bool(self.failed) or self.answered >= before + 10, 60)
        assert not self.failed, self.failed[:3]


def versions(url: str) -> Iterator[str]:
    """Return the versions of all workers."""
    for worker in httpx.get(f"{url}/fleet", trust_env=False).json()["workers"]:
        yield worker["version"]
