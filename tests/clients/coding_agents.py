"""Coding agents as their makers ship them: how each is installed, pointed at a router, and run."""

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.agent_worker import Call
from tests.clients.environments import install_node
from tests.clients.server import KEY

MODEL = "claude-sonnet-4-5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Folders of one run.

    Attributes:
        home: Home of the agent, which holds its settings and its sessions.
        folder: Where it works.
        word: In ``a.txt``, which the agent reads.
    """

    home: Path
    folder: Path
    word: str

    @classmethod
    def make(cls, root: Path) -> "Workplace":
        """Folders below ``root``, with the file that the agent reads."""
        place = cls(home=root / "home", folder=root / "work", word=f"word-{secrets.token_hex(8)}")
        place.home.mkdir()
        place.folder.mkdir()
        (place.folder / "a.txt").write_text(f"{place.word}\n")
        return place


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent: its package, and what differs from the others."""

    name: str
    packages: tuple[str, ...]
    read: tuple[str, str]  # tool and argument that read a file
    shell: tuple[str, str]  # tool and argument that run a command
    run: tuple[str, ...]
    resume: tuple[str, ...]

    def steps(self, place: Workplace, written: str) -> Sequence[Call]:
        """Two calls: a file is read and copied, and another one is written."""
        source = place.folder / "a.txt"
        name, argument = self.read
        value = f"cat {source}" if name == self.shell[0] else str(source)
        copy = f"cp {source} {place.folder / written} && cat {place.folder / written}"
        return [Call(name, {argument: value}), Call(self.shell[0], {self.shell[1]: copy})]

    def command(self, prompt: str, *, resumes: bool) -> list[str]:
        """The command line, for the folder that `bin_folder` returns."""
        return [*(self.resume if resumes else self.run), prompt]

    def bin_folder(self) -> Path:
        """Where its program is; installs it first."""
        return install_node(self.name, self.packages) / "node_modules" / ".bin"

    def environment(self, place: Workplace, url: str) -> dict[str, str]:
        """Environment and settings files that point the agent at the router."""
        (place.home / ".codex").mkdir(exist_ok=True)
        (place.home / ".codex" / "config.toml").write_text(_CODEX.format(url=url, model=MODEL))
        folder = place.home / ".config" / "opencode"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "opencode.json").write_text(json.dumps(_opencode(url)))
        return {
            "PATH": f"{self.bin_folder()}:{os.environ['PATH']}",
            "HOME": str(place.home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "BATON_KEY": KEY,
            "NO_PROXY": "*",
            "TERM": "dumb",
        }


_CODEX = """\
model = "{model}"
model_provider = "baton"
[model_providers.baton]
name = "baton"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "BATON_KEY"
"""


def _opencode(url: str) -> dict[str, object]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "baton",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 131072, "output": 8192}}},
    }
    return {"provider": {"baton": provider}, "model": f"baton/{MODEL}"}


_CLAUDE = ("--model", MODEL, "--allowedTools", "Read Bash", "-p")
_CODEX_EXEC = ("--skip-git-repo-check", "--sandbox", "danger-full-access")

AGENTS = (
    Agent(
        "claude",
        ("@anthropic-ai/claude-code@2.1.332",),
        read=("Read", "file_path"),
        shell=("Bash", "command"),
        run=("claude", *_CLAUDE),
        resume=("claude", "--continue", *_CLAUDE),
    ),
    Agent(
        "codex",
        ("@openai/codex@0.171.0",),
        read=("exec_command", "cmd"),
        shell=("exec_command", "cmd"),
        run=("codex", "exec", *_CODEX_EXEC),
        resume=("codex", "exec", *_CODEX_EXEC, "resume", "--last"),
    ),
    Agent(
        "opencode",
        ("opencode-ai@1.18.33",),
        read=("read", "filePath"),
        shell=("bash", "command"),
        run=("opencode", "run"),
        resume=("opencode", "run", "--continue"),
    ),
)
