"""Runs a client's scenarios against a router, and reads what they tell."""

import asyncio
import json
import os
from typing import NamedTuple

from tests.clients.environments import HERE, Client, command
from tests.clients.server import KEY, MODEL

_LIMIT_S = 240


class Result(NamedTuple):
    """What became of one scenario: ``works`` or ``fails``, and why."""

    scenario: str
    result: str
    why: str


async def run(client: Client, url: str) -> list[Result]:
    """Every scenario of a client.

    Args:
        client: Whose environment is made if it is not there.
        url: Of the router.

    Raises:
        NoEnvironmentError: The client cannot be installed.
        RuntimeError: It ended before it told of any scenario.
    """
    arguments, folder = await asyncio.to_thread(command, client)
    process = await asyncio.create_subprocess_exec(
        *arguments,
        cwd=folder,
        env=_environment(url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        err += f"\nstopped after {_LIMIT_S} s".encode()
    lines = [line[1:] for line in out.decode().splitlines() if line.startswith("@{")]
    results = [Result(**json.loads(line)) for line in lines]
    if not results or process.returncode:
        raise RuntimeError(f"{client.title} ended early:\n{err.decode()[-3000:]}")
    return results


def _environment(url: str) -> dict[str, str]:
    """The client's: without ours, and without a proxy on the way to the router."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONWARNINGS") and not name.lower().endswith("_proxy")
    }
    return {
        **kept,
        "PYTHONPATH": str(HERE),
        "BATON_URL": url,
        "BATON_KEY": KEY,
        "BATON_MODEL": MODEL,
        "OPENAI_API_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "*",
    }
