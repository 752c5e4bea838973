"""Runs a plan in real time: sends each request at its time, and records its end."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import psutil

from loadtest.client.dialogue import Dialogue
from loadtest.client.exchange import Exchanged, Target, exchange
from loadtest.client.records import CallRecord, ClientJob, ClientReport, ServerOptions
from loadtest.workloads.agents import agent_prompt
from loadtest.workloads.call_graph import CallFrontier
from loadtest.workloads.plan import Conversation, Turn
from loadtest.workloads.prompts import PromptWriter

_LAG_PERIOD_S = 0.02
_BUILD_S = 0.1  # before a request of a graph is due: bodies are too large to be kept for long
_ROUND = 6  # decimal places of recorded seconds: microseconds


class LagMeter:
    """Measures the delay of timers in this process's event loop, fifty times a second."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []

    async def watch(self) -> None:
        """Sample the delay until cancelled."""
        while True:
            due_s = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._lags_s.append(max(0.0, time.monotonic() - due_s))

    def percentiles_s(self) -> tuple[float, float, float]:
        """Return p50, p99 and maximum."""
        if not self._lags_s:
            return 0.0, 0.0, 0.0
        p50, p99, worst = np.percentile(self._lags_s, [50, 99, 100])
        return float(p50), float(p99), float(worst)


class PlanRunner:
    """Runs a job; calls ``record`` for each finished request."""

    def __init__(self, job: ClientJob, record: Callable[[CallRecord], None]) -> None:
        self._job = job
        self._record = record
        self._requests = RequestWriter(job.server, job.plan.seed)
        self._count = 0

    async def run(self, zero_s: float) -> ClientReport:
        """Send everything and return when the last request has ended.

        ``zero_s`` is second 0 of the plan on the monotonic clock.
        """
        meter = LagMeter()
        process = psutil.Process()
        began_s = time.monotonic()
        cpu_s = _cpu_s(process)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(meter.watch())
            async with asyncio.TaskGroup() as conversations:
                ordered = sorted(self._job.plan.conversations, key=lambda c: c.start_s)
                for conversation in ordered:
                    if conversation.is_graph:
                        await _sleep_until(zero_s + conversation.start_s)
                        conversations.create_task(self._follow(conversation, zero_s))
                        continue
                    # Built early, so that building does not delay the request.
                    dialogue = self._requests.dialogue(conversation)
                    body = self._requests.body(conversation.turns[0], dialogue)
                    await _sleep_until(zero_s + conversation.start_s)
                    conversations.create_task(self._converse(conversation, dialogue, body, zero_s))
            watch.cancel()
        wall_s = time.monotonic() - began_s
        p50_s, p99_s, worst_s = meter.percentiles_s()
        return ClientReport(
            client=self._job.client,
            requests=self._count,
            lag_p50_s=p50_s,
            lag_p99_s=p99_s,
            lag_max_s=worst_s,
            cpu_share=(_cpu_s(process) - cpu_s) / max(wall_s, 1e-9),
            wall_s=wall_s,
        )

    async def _converse(
        self,
        conversation: Conversation,
        dialogue: Dialogue,
        first: dict[str, Any],
        zero_s: float,
    ) -> None:
        intended_s = zero_s + conversation.start_s
        last = conversation.turns[-1]
        for number, turn in enumerate(conversation.turns):
            if number:
                intended_s = time.monotonic() + turn.think_s
                if not turn.continues:
                    dialogue.begin()
                body = self._requests.body(turn, dialogue)
                await _sleep_until(intended_s)
            else:
                body = first
            exchanged = await self._requests.send(
                turn, body, keep_text=self._job.keep_answers or turn is not last
            )
            dialogue.keep(exchanged.reader.text, exchanged.reader.calls)
            self._count += 1
            self._record(self._record_of(turn, exchanged, intended_s, zero_s))

    async def _follow(self, conversation: Conversation, zero_s: float) -> None:
        """Send each turn of a graph when those that it waits for have ended, and failed or not."""
        turns = conversation.turns
        frontier = CallFrontier([turn.after for turn in turns], [turn.think_s for turn in turns])
        async with asyncio.TaskGroup() as group:

            async def call(number: int, due_s: float) -> None:
                turn = turns[number]
                await _sleep_until(due_s - _BUILD_S)
                body = self._requests.body(turn, Dialogue())
                await _sleep_until(due_s)
                exchanged = await self._requests.send(turn, body, keep_text=self._job.keep_answers)
                self._count += 1
                self._record(self._record_of(turn, exchanged, due_s, zero_s))
                start(frontier.ended(number, time.monotonic()))

            def start(ready: list[tuple[int, float]]) -> None:
                for number, due_s in ready:
                    group.create_task(call(number, due_s))

            start(frontier.begin(zero_s + conversation.start_s))

    def _record_of(
        self, turn: Turn, exchanged: Exchanged, intended_s: float, zero_s: float
    ) -> CallRecord:
        reader = exchanged.reader
        details = reader.usage.prompt_tokens_details
        connected_s = exchanged.connected_s
        return CallRecord(
            index=turn.index,
            client=self._job.client,
            group=turn.group,
            tenant=turn.tenant,
            session=turn.session,
            turn=turn.number,
            intended_s=round(intended_s - zero_s, _ROUND),
            sent_s=round(exchanged.sent_s - zero_s, _ROUND),
            connected_s=None if connected_s is None else round(connected_s - zero_s, _ROUND),
            chunk_s=[round(moment_s - zero_s, _ROUND) for moment_s in reader.chunk_s],
            ended_s=round(exchanged.ended_s - zero_s, _ROUND),
            end=exchanged.end,
            status=reader.status,
            detail=exchanged.detail,
            finish_reason=reader.finish_reason,
            planned_prompt_tokens=turn.prompt_tokens,
            planned_answer_tokens=turn.max_tokens,
            prompt_tokens=reader.usage.prompt_tokens,
            answer_tokens=reader.usage.completion_tokens,
            cached_tokens=details.cached_tokens if details else None,
            request_id=reader.request_id,
            answer=reader.text if self._job.keep_answers else None,
            retry_after=reader.retry_after,
        )


class RequestWriter:
    """Converts turns of a plan to requests; ``seed`` is the plan's."""

    def __init__(self, server: ServerOptions, seed: int) -> None:
        self._server = server
        self._prompts = PromptWriter(seed)
        self._chat = Target.of(server.url, "/v1/chat/completions", server.headers)
        self._completions = Target.of(server.url, "/v1/completions", server.headers)

    def dialogue(self, conversation: Conversation) -> Dialogue:
        """Return the dialogue of a conversation, before its first turn."""
        if conversation.agent is None:
            return Dialogue()
        system, tools = agent_prompt(conversation.agent, self._prompts)
        if self._server.tools == "described":
            return Dialogue(f"{system}\n{json.dumps(tools)}")  # with the spaces of templates
        return Dialogue(system, tools)

    def body(self, turn: Turn, dialogue: Dialogue) -> dict[str, Any]:
        """Return the JSON body of the next turn of a dialogue."""
        server = self._server
        body: dict[str, Any] = {"max_tokens": turn.max_tokens, "temperature": 0}
        if turn.body:
            body = msgspec.json.decode(turn.body)
        body |= {"model": server.model, "stream": True}
        if server.include_usage:
            body["stream_options"] = {"include_usage": True}
        if turn.body:
            return body
        if server.ignore_eos:
            body["ignore_eos"] = True
        if turn.tenant and turn.tenant not in server.tenant_keys:
            body["user"] = turn.tenant
        messages = dialogue.ask(self._prompts.text(turn.prompt))
        if server.token_ids and len(messages) == 1:
            body["prompt"] = self._prompts.token_ids(turn.prompt)
        elif server.endpoint == "completions":
            body["prompt"] = "\n".join(message["content"] for message in messages)
        else:
            body["messages"] = messages
            if dialogue.tools:
                body["tools"] = dialogue.tools
        return body

    async def send(self, turn: Turn, body: dict[str, Any], *, keep_text: bool) -> Exchanged:
        """Send a turn and read its response."""
        key = self._server.tenant_keys.get(turn.tenant, self._server.api_key)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if turn.tenant and turn.tenant not in self._server.tenant_keys:
            headers["x-baton-tenant"] = turn.tenant  # other servers get `user`
        return await exchange(
            self._chat if "messages" in body else self._completions,
            body,
            headers=headers,
            timeout_s=self._server.timeout_s,
            abort_after_s=turn.abort_after_s,
            keep_text=keep_text,
        )


async def _sleep_until(moment_s: float) -> None:
    """Sleep, but never wake up early: uvloop's timers count whole milliseconds."""
    while (left_s := moment_s - time.monotonic()) > 0:  # noqa: ASYNC110 - time is the event
        await asyncio.sleep(left_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
