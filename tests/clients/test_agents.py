"""Coding agents finish tasks with tools that are really called, resume, and may be interrupted."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from baton.types.geometry import BLOCK_TOKENS
from router.served_model import ServedModel
from tests.clients.agent_worker import AgentWorker, Steps
from tests.clients.coding_agents import AGENTS, MODEL, Agent, Workplace
from tests.clients.environments import NoEnvironmentError
from tests.clients.server import KEY, serving
from tests.router.conftest import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_RUN_S = 240
_CONTEXT_TOKENS = 131_072


@asynccontextmanager
async def router_for(steps: Steps, step_s: float = 0.002) -> AsyncIterator[tuple[str, AgentWorker]]:
    names = (MODEL, "default")
    model = ServedModel(
        resolve_model(DEFAULT_MODEL), names, max_context_tokens=_CONTEXT_TOKENS, emulated=True
    )
    worker = AgentWorker(model, steps, step_s)
    async with serving(model, worker) as url:
        yield url, worker


async def begun(
    agent: Agent, place: Workplace, url: str, prompt: str, *, resumes: bool = False
) -> asyncio.subprocess.Process:
    try:
        environment = await asyncio.to_thread(agent.environment, place, url)
    except NoEnvironmentError as error:
        pytest.skip(f"no environment for {agent.name}: {error}")
    return await asyncio.create_subprocess_exec(
        *agent.command(prompt, resumes=resumes),
        cwd=place.folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


async def ended(process: asyncio.subprocess.Process) -> str:
    try:
        async with asyncio.timeout(_RUN_S):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        out, _ = await process.communicate()
        pytest.fail(f"still running after {_RUN_S} s:\n{out.decode()[-3000:]}")
    return out.decode()


def cached_shares(worker: AgentWorker) -> list[float]:
    """For each prompt with tools, the share of its tokens in blocks of earlier prompts."""
    seen: set[bytes] = set()
    shares: list[float] = []
    for submission in worker.submissions:
        ids = submission.prompt_tokens
        size = BLOCK_TOKENS * 4
        prefixes = [sha256(ids[:end]).digest() for end in range(size, len(ids) + 1, size)]
        cached = next((n for n, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
        if "<tool_call>" in submission.sampling.grammar:
            shares.append(cached * size / len(ids))
        seen.update(prefixes)
    return shares


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_an_agent_finishes_two_tasks_with_two_calls_each(
    agent: Agent, tmp_path: Path
) -> None:
    place = Workplace.make(tmp_path)
    calls = {f"TASK-{n}": agent.steps(place, f"copy-{n}.txt") for n in (1, 2)}
    steps = Steps(calls)
    async with router_for(steps) as (url, worker):
        for n in (1, 2):
            process = await begun(
                agent, place, url, f"TASK-{n}: copy a.txt to copy-{n}.txt", resumes=n == 2
            )
            out = await ended(process)
            assert process.returncode == 0, out[-3000:]
            assert place.word in out, out[-3000:]
            assert (place.folder / f"copy-{n}.txt").read_text() == f"{place.word}\n"
        async with httpx.AsyncClient(
            trust_env=False, headers={"authorization": f"Bearer {KEY}"}
        ) as client:
            answer = await client.get(f"{url}/fleet/requests?limit=500")
            lines = answer.json()["requests"]
            reports = [
                (await client.get(f"{url}/fleet/requests/{line['id']}")).json() for line in lines
            ]
    shares = cached_shares(worker)
    print(f"cached share of each prompt of {agent.name}: {[round(s, 3) for s in shares]}")
    assert len(shares) >= 6 and min(shares[1:]) >= 0.9, "all but the first prompt of the session"
    assert all(report["session"] for report in reports)
    assert [report["prompt_change"] for report in reports] == [None] * len(reports)
    assert steps.refused == []
    assert len([text for text in steps.made if text.startswith("<tool_call>")]) >= 4
    assert all(place.word in result for result in steps.results)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_an_agent_that_is_interrupted_leaves_nothing_running(
    agent: Agent, tmp_path: Path
) -> None:
    place = Workplace.make(tmp_path)
    steps = Steps({"TASK-1": agent.steps(place, "copy.txt")})
    async with router_for(steps, step_s=1.0) as (url, worker):
        process = await begun(agent, place, url, "TASK-1: copy a.txt to copy.txt")
        await until(lambda: bool(steps.made), timeout_s=_RUN_S)
        await asyncio.sleep(2.0)  # in the middle of the call
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(1.0)
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await ended(process)
        await until(lambda: bool(worker.cancels), timeout_s=30)
    assert not (place.folder / "copy.txt").exists()
