"""Bodies of real length: tools, conversations, schemas and answers, by each API that takes them.

The model is a tiny one of real layers, since emulated engines follow no grammars. Each answer comes
in one attempt and is right, no event loop is held for 50 ms of CPU time, and memory comes back.
"""

import asyncio
import gc
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import jsonschema
import pytest

from baton.engine.cpu.native.library import load as load_native
from baton.telemetry.process_memory import ROUTER_OBJECTS, collect_rarely, give_back
from benchmarks.ladder import bodies as ladder
from router.frontend.api.bodies.fields import MAX_TOOLS
from tests.ladder.rungs import (
    CONTEXT_TOKENS,
    NO_AUTHORITIES,
    VOCABULARY_S,
    LadderFleet,
    anonymous_bytes,
    ladder_fleet,
)
from tests.ladder.test_prompt_sizes import artifact, check_held, holds, tiny_model
from tests.ladder.watched_worker import LoopHolds
from tests.registry.conftest import redis_server

__all__ = ["artifact", "holds", "redis_server", "tiny_model"]

# Without AVX-512 the layers run in torch's own kernels, which keep more working memory: 70 MB.
GROWTH_BYTES = (64 if load_native() is not None else 96) << 20
BODIES = ladder.bodies()
LONG_ANSWER = "answer of 8,000 tokens"
APIS = {
    "chat": ("/v1/chat/completions", dict),
    "responses": ("/v1/responses", ladder.responses_of),
    "messages": ("/v1/messages", ladder.messages_of),
}


@dataclass
class Told:
    """What an answer says, whichever API it came by."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments
    finish: str = ""
    story: dict = field(default_factory=dict)


def whole(api: str, answer: dict) -> Told:
    """An answer that came in one piece."""
    if api == "chat":
        [choice] = answer["choices"]
        message = choice["message"]
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        named = [(one["name"], one["arguments"]) for one in calls]
        return Told(message["content"] or "", named, choice["finish_reason"])
    if api == "responses":
        texts = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        named = [(one["name"], one["arguments"]) for one in calls]
        return Told("".join(texts), named, answer["status"])
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    named = [(one["name"], json.dumps(one["input"])) for one in calls]
    return Told("".join(texts), named, answer["stop_reason"])


def streamed(api: str, events: list[dict]) -> Told:
    """The same, put together from the events of a stream."""
    told, arguments, names = Told(), {}, {}
    for event in events:
        if api == "responses" and event["type"] == "response.output_text.delta":
            told.text += event["delta"]
        if api == "messages" and event["type"] == "content_block_delta":
            told.text += event["delta"]["text"]
        for choice in event.get("choices", ()):
            told.text += choice["delta"].get("content") or ""
            told.finish = choice["finish_reason"] or told.finish
            for call in choice["delta"].get("tool_calls") or ():
                index, function = call["index"], call["function"]
                names[index] = names.get(index) or function["name"]
                arguments[index] = arguments.get(index, "") + function.get("arguments", "")
    told.calls = [(name, arguments[index]) for index, name in names.items()]
    return told


class Caller:
    """A client of the fleet's router."""

    def __init__(self, fleet: LadderFleet) -> None:
        self.fleet = fleet

    async def ask(self, api: str, body: dict, mode: str, *, stream: bool = False) -> Told:
        return await asyncio.to_thread(self._ask, api, body, mode, stream)

    def _ask(self, api: str, body: dict, mode: str, stream: bool) -> Told:
        path, told_of = APIS[api]
        sent = told_of({**body, "stream": stream})
        headers = {"x-baton-mode": mode, "accept-encoding": "identity"}
        fields = {"base_url": self.fleet.url, "headers": headers, "verify": NO_AUTHORITIES}
        with httpx.Client(timeout=120, **fields) as client:
            answer = client.post(path, json=sent)
            assert answer.status_code == 200, answer.text[:1000]
            if stream:
                lines = (line.removeprefix("data: ") for line in answer.text.splitlines())
                told = streamed(api, [json.loads(line) for line in lines if line.startswith("{")])
            else:
                told = whole(api, answer.json())
            name = answer.headers["x-request-id"]
            told.story = client.get(f"/fleet/requests/{name}").json()
        assert told.story["attempts"] == 1
        assert told.story["route"]["mode"] == mode
        return told


def check(chat: dict, told: Told) -> None:
    """The answer is what the body asks for."""
    if chat.get("tool_choice") == "required":
        functions = {item["function"]["name"]: item["function"] for item in chat["tools"]}
        [(name, arguments)] = told.calls
        jsonschema.validate(json.loads(arguments), functions[name]["parameters"])
        assert told.story["finish_reasons"] == ["tool_calls"]
    elif "response_format" in chat:
        schema = chat["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(told.text), schema)
        assert told.story["finish_reasons"] == ["stop"]
    else:
        assert told.story["completion_tokens"] == chat["max_tokens"]
        assert len(told.text) > chat["max_tokens"]


async def check_everywhere(caller: Caller, chat: dict) -> None:
    """One body by each API, by a hand-off and without one, streamed and whole: one answer."""
    golden = await caller.ask("chat", chat, "colocated")
    check(chat, golden)
    handed = await caller.ask("chat", {**chat, "cache_salt": "b"}, "disaggregated", stream=True)
    check(chat, handed)
    assert (handed.text, handed.calls) == (golden.text, golden.calls)
    for api in ("responses", "messages"):
        told = await caller.ask(api, chat, "colocated")
        check(chat, told)
        assert told.story["prompt_tokens"] == golden.story["prompt_tokens"]
        assert told.text == golden.text
        for ours, theirs in zip(told.calls, golden.calls, strict=True):
            assert ours[0] == theirs[0]
            assert json.loads(ours[1]) == json.loads(theirs[1])


async def check_long_answers(caller: Caller, ways: Sequence[tuple[str, bool]]) -> None:
    """Some at once: by these APIs, streamed or whole."""
    chat = BODIES[LONG_ANSWER]
    asked = (caller.ask(api, chat, "disaggregated", stream=stream) for api, stream in ways)
    answers = await asyncio.gather(*asked)
    for told in answers:
        check(chat, told)
        assert told.text == answers[0].text


async def memory_bytes(fleet: LadderFleet) -> dict[str, int]:
    """Of this process, which is the router, what it could give back left out."""
    gc.collect()
    give_back()
    return {"router": anonymous_bytes(os.getpid()), **await fleet.memory_bytes()}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "grpc"])
async def test_each_body_by_each_api(artifact, tiny_model, redis_server, holds, transport):
    settings = {
        "model": tiny_model,
        "max_context_tokens": CONTEXT_TOKENS,
        "transports": (transport,),
    }
    names = ("prefill-0", "decode-0")
    ways = [("chat", False), ("chat", True)]
    if transport != "shared_memory":  # a slow test
        ways += [("responses", True), ("messages", True)]
    async with ladder_fleet(artifact, redis_server.url, transport, *names, **settings) as fleet:
        await asyncio.to_thread(fleet.router.lanes.first.model.speed_up)
        caller = Caller(fleet)
        await check_everywhere(caller, BODIES["short"])
        collect_rarely(ROUTER_OBJECTS)
        await asyncio.sleep(VOCABULARY_S)
        before = await memory_bytes(fleet)
        held_s: dict[str, float] = {}
        for name, chat in BODIES.items():
            with LoopHolds().watched() as watch:
                if name == LONG_ANSWER:
                    await check_long_answers(caller, ways)
                else:
                    await check_everywhere(caller, chat)
            held_s |= {f"{name} {worker}": s for worker, s in fleet.held_s(holds).items()}
            held_s[f"{name} router {watch.what}"] = watch.longest_s
        await fleet.baseline()
        after = await memory_bytes(fleet)
    check_held(held_s)
    growth = {name: after[name] - before[name] for name in after}
    assert max(growth.values()) < GROWTH_BYTES, growth


async def test_more_tools_than_that_are_refused_with_their_limit(
    artifact, tiny_model, redis_server, holds
):
    async with ladder_fleet(artifact, redis_server.url, "refused", "decode-0") as fleet:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as client:
            for api, (path, told_of) in APIS.items():
                tools = ladder.tools_of(MAX_TOOLS + 1, 40_000)
                body = told_of({**BODIES["short"], "tools": tools, "tool_choice": "required"})
                answer = await client.post(path, json=body)
                assert answer.status_code == 400, api
                assert f"at most {MAX_TOOLS} items" in answer.json()["error"]["message"]
