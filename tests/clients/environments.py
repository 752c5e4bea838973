"""An environment for each client, outside the repository, made once and kept.

They lie in ``$BATON_CLIENTS``, or in ``~/.cache/baton-clients``; a client's packages are in the
name of its folder, so that a change of versions makes another one.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_INSTALL_S = 900


class NoEnvironmentError(Exception):
    """It cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client.

    Attributes:
        title: For people.
        file: In ``python/`` or ``node/``.
        packages: With versions, or bounds where what a version needs is not always to be had; the
            first is the client itself.
        own: Runs in the interpreter of the tests, which has the packages.
        small: Also in CI.
    """

    title: str
    file: str
    packages: tuple[str, ...]
    own: bool = False
    small: bool = False

    @property
    def name(self) -> str:
        """For files and tests."""
        return self.file.partition(".")[0].rstrip("_")

    @property
    def is_node(self) -> bool:
        """Whether it runs in Node."""
        return self.file.endswith(".mjs")


CLIENTS = (
    Client(
        title="openai (Python)",
        file="openai_python.py",
        packages=("openai",),
        own=True,
        small=True,
    ),
    Client(
        title="a client generated from /openapi.json",
        file="generated.py",
        packages=("openapi-python-client==0.29.1",),
    ),
    Client(
        title="anthropic (Python)",
        file="anthropic_python.py",
        packages=("anthropic==2.12.0",),
    ),
    Client(
        title="pydantic-ai",
        file="pydantic_ai_.py",
        packages=("pydantic-ai-slim[openai]==2.68.0",),
    ),
    Client(title="instructor", file="instructor_.py", packages=("instructor==1.17.0",)),
    Client(title="openai-agents", file="openai_agents_.py", packages=("openai-agents==0.24.0",)),
    Client(
        title="LangChain",
        file="langchain_openai_.py",
        packages=("langchain-openai>=1.4,<1.8", "langchain>=1.4,<1.6", "langchain-anthropic<1.8"),
    ),
    Client(
        title="LlamaIndex",
        file="llama_index_.py",
        packages=(
            "llama-index-llms-openai-like==0.8.1",
            "llama-index-embeddings-openai-like==0.4.0",
        ),
    ),
    Client(
        title="LiteLLM SDK",
        file="litellm_sdk.py",
        packages=("litellm>=1.100,<1.110", "mcp"),
    ),
    Client(
        title="LiteLLM proxy", file="litellm_proxy.py", packages=("litellm[proxy]>=1.100,<1.110",)
    ),
    Client(title="guidellm", file="guidellm_.py", packages=("guidellm==0.8.1",)),  # brings torch
    Client(title="aiperf", file="aiperf_.py", packages=("aiperf==0.13.0",)),
    Client(title="openai (Node)", file="openai_node.mjs", packages=("openai@7.57.0", "zod@4.6.7")),
    Client(
        title="Vercel AI SDK",
        file="ai_sdk.mjs",
        packages=(
            "ai@7.0.173",
            "@ai-sdk/openai@4.0.118",
            "@ai-sdk/openai-compatible@3.0.92",
            "zod@4.6.7",
        ),
    ),
)


def command(client: Client) -> tuple[list[str], Path]:
    """How to run a client's file, and in which folder; makes its environment first.

    Raises:
        NoEnvironmentError: There is no Node, no registry, or no such package.
    """
    if client.own:
        return [sys.executable, str(HERE / "python" / client.file)], HERE
    folder = _folder(client)
    if client.is_node:
        return _node(client, folder)
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        _install([sys.executable, "-m", "venv", "--clear", str(folder)])
        _install([str(python), "-m", "pip", "install", "-q", *client.packages])
        (folder / "done").touch()
    return [str(python), str(HERE / "python" / client.file)], HERE


def version(client: Client) -> str:
    """The version of the client that is installed."""
    package = client.packages[0].partition("[")[0].partition("==")[0].partition(">=")[0]
    if client.is_node:
        name = package.rpartition("@")[0]
        told = (_folder(client) / "node_modules" / name / "package.json").read_text()
        return str(json.loads(told)["version"])
    python = sys.executable if client.own else str(_folder(client) / "bin" / "python")
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _folder(client: Client) -> Path:
    return _folder_of(client.name, client.packages)


def _folder_of(name: str, packages: tuple[str, ...]) -> Path:
    cache = os.environ.get("BATON_CLIENTS") or Path.home() / ".cache" / "baton-clients"
    spelled = " ".join((sys.version.split()[0], *packages))
    digest = hashlib.sha256(spelled.encode()).hexdigest()[:12]
    return Path(cache) / f"{name}-{digest}"


def _node(client: Client, folder: Path) -> tuple[list[str], Path]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise NoEnvironmentError("there is no Node here")
    _install_node(npm, folder, client.packages)
    for file in ("scenarios.mjs", client.file):  # packages are looked for beside the file
        shutil.copy(HERE / "node" / file, folder / file)
    return [node, str(folder / client.file)], folder


def install_node(name: str, packages: tuple[str, ...]) -> Path:
    """The folder with these packages of npm; installs them first.

    Raises:
        NoEnvironmentError: There is no Node, no registry, or no such package.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NoEnvironmentError("there is no Node here")
    folder = _folder_of(name, packages)
    _install_node(npm, folder, packages)
    return folder


def _install_node(npm: str, folder: Path, packages: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "done").exists():
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        _install([npm, "install", "--no-audit", "--no-fund", *packages], folder)
        (folder / "done").touch()


def _install(arguments: list[str], folder: Path | None = None) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            arguments,
            cwd=folder,
            env=plain,
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoEnvironmentError(str(error)) from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NoEnvironmentError(f"{' '.join(arguments[-4:])}: {' '.join(last)}")
