"""The translator beside sockets that repeat what a real vLLM sent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.engine.vllm import engine, protocol, server
from baton.engine.vllm.control import VllmControl
from baton.engine.vllm.engine import VllmEngine, VllmParts
from baton.engine.vllm.facts import VllmFacts, facts_of, hand_off_id
from baton.engine.vllm.scored_prompt import prompt_logprobs
from baton.engine.vllm.translator import event_prefixes, hand_off_of
from baton.types import events as ev
from baton.types.block_hashes import block_hashes
from baton.types.params import SamplingParams
from baton.wire.tokens import pack_tokens
from tests.engine.vllm.record import FRANCE, LONG, PROBE, SEEDS, recorded_messages

RECORDED = Path(__file__).parent / "recorded"
EOS = (2,)
BLOCKS = 1456
VOCABULARY = 49152
CONFIG = SimpleNamespace(eos_token_ids=EOS, vocab_size=VOCABULARY)
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
END = b"0\r\n\r\n"
Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


def facts(hand_off: str = "nixl/block32") -> VllmFacts:
    info = msgspec.json.decode((RECORDED / "server_info.json").read_bytes())
    return msgspec.structs.replace(facts_of("0.32.0", info), hand_off=hand_off)


class Replay:
    """Sockets of a vLLM whose every response to a prompt is ``reply``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reply: Reply = sending(b"")
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.hung_up = asyncio.Event()
        self.live = recorded_messages("events")
        self.reset = b'{"success":true}'
        self.health = b"200 OK"
        self.adapter_status = b"200 OK"
        self.adapter_calls: list[tuple[str, dict[str, Any]]] = []

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            target = head.split(b" ", 2)[1]
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
            if target.endswith(b"_lora_adapter"):
                body = msgspec.json.decode(await reader.readexactly(length))
                self.adapter_calls.append((target.decode(), body))
                writer.write(HEAD.replace(b"200 OK", self.adapter_status) + chunk(b"told") + END)
                return
            if target == b"/inference/v1/abort_requests":
                self.aborted += msgspec.json.decode(await reader.readexactly(length))["request_ids"]
            if target != b"/inference/v1/generate":
                body = self.reset if target.startswith(b"/reset") else b""
                writer.write(HEAD.replace(b"200 OK", self.health) + chunk(body) + END)
                return
            self.bodies.append(msgspec.json.decode(await reader.readexactly(length)))
            await self.reply(writer)
            await reader.read(1)
            self.hung_up.set()

    async def events(self, publisher: zmq.asyncio.Socket) -> None:
        """Publish after each subscription."""
        publisher.bind(f"ipc://{self.folder}/events")
        while True:
            await publisher.recv_multipart()
            for parts in self.live:
                await publisher.send_multipart(parts)

    async def replay(self, router: zmq.asyncio.Socket) -> None:
        router.bind(f"ipc://{self.folder}/replay")
        while True:
            client, _, number = await router.recv_multipart()
            assert number == bytes(8)
            for parts in recorded_messages("replay"):
                await router.send_multipart([client, *parts])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def sending(data: bytes, end: bytes = END) -> Reply:
    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(data) + end)
        writer.close()

    return reply


class Running:
    """A translator, and what it has reported."""

    def __init__(self, replay: Replay, hand_off: str = "nixl/block32", **options: Any) -> None:
        self.replay = replay
        self.reports: list[messages.Report] = []
        self.returncode: int | None = None
        folder = str(replay.folder)
        origin = server.origin_in(folder)
        of = facts(hand_off)
        parts = VllmParts(
            origin,
            VllmControl(origin, lambda: self.returncode is not None),
            event_prefixes(folder, of, self._send),
            hand_off_of(folder, of, self._send),
        )
        self.engine = VllmEngine(self._send, parts, of, **{"config": CONFIG, **options})

    def _send(self, *reports: messages.Report) -> None:
        self.reports.extend(reports)

    def submit(
        self,
        prompt: list[int],
        kind: Kind = Kind.FULL,
        skip_blocks: int = 0,
        emitted: tuple[None, ...] = (),
        **params: Any,
    ) -> None:
        sampling = msgspec.convert({"max_tokens": 8, **params}, SamplingParams)
        spec = RequestSpec(
            kind=kind,
            params=sampling,
            hash_seed=SEEDS[0],
            skip_blocks=skip_blocks,
            emitted=emitted,
        )
        self.engine.handle(
            messages.Submit(request_id="r", prompt_token_ids=pack_tokens(prompt), spec=spec)
        )

    def of(self, kind: type) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]

    async def first(self, kind: type) -> Any:
        async with asyncio.timeout(10):
            while not self.of(kind):
                await asyncio.sleep(0.005)
        return self.of(kind)[0]

    async def until_cached(self) -> None:
        """Wait until the first 192 tokens of `LONG` are known to be cached."""
        own = block_hashes(SEEDS[0], LONG[:192])
        async with asyncio.timeout(10):
            while self.engine._prefixes.cached_tokens(own) < 192:
                await asyncio.sleep(0.005)

    async def end(self) -> ev.Ended:
        ended: ev.Ended = await self.first(ev.Ended)
        return ended


@pytest.fixture
async def running(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    replay = Replay(tmp_path)
    if "late_subscription" in request.node.name:
        replay.live = []
    async with translating(replay) as running:
        yield running


@contextlib.asynccontextmanager
async def translating(
    replay: Replay, hand_off: str = "nixl/block32", **options: Any
) -> AsyncIterator[Running]:
    server = await asyncio.start_unix_server(replay.http, replay.folder / "http")
    running = Running(replay, hand_off, **options)
    with zmq.asyncio.Context() as context:
        async with asyncio.TaskGroup() as tasks:
            with context.socket(zmq.XPUB) as publisher, context.socket(zmq.ROUTER) as router:
                served = [
                    tasks.create_task(replay.events(publisher)),
                    tasks.create_task(replay.replay(router)),
                ]
                yield running
                await running.engine.close()
                for task in served:
                    task.cancel()
    server.close()


def test_the_numerics_id_names_what_makes_tokens_differ() -> None:
    name = "vllm/0.32.0/bf16/bf16/cpu-auto"
    assert facts().numerics_id == name
    wide = msgspec.json.decode((RECORDED / "server_info.json").read_bytes())
    wide["vllm_config"]["parallel_config"]["tensor_parallel_size"] = 2
    both = facts_of("0.32.0", wide)
    assert both.numerics_id == name
    exact = msgspec.structs.replace(both, exact="5f")
    assert exact.numerics_id == f"{name}/tp2/exact/5f"
    assert hand_off_id("nixl", 32, 1) != hand_off_id("nixl", 32, 2)
    assert hand_off_id("baton", 32, 1) == hand_off_id("baton", 32, 2)


async def test_a_response_is_reported_from_admission_to_end(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "cached.sse").read_bytes())
    running.submit(LONG, max_tokens=3, temperature=0.0)
    ended = await running.end()
    assert ended.error_code == ""
    assert (ended.cached_tokens, ended.computed_tokens) == (192, 8)
    runs = running.of(ev.Tokens)
    assert [run.index for run in runs] == [0, 1, 2]
    assert runs[-1].finish_reason == "length"
    order = [one for one in running.reports if isinstance(one, ev.Admitted | ev.Tokens)]
    assert type(order[0]) is ev.Admitted
    before_last = order[order.index(runs[-1]) - 1]
    assert isinstance(before_last, ev.Admitted), "clients get vLLM's count, not the expected one"
    assert before_last.cached_tokens == 192
    assert running.of(ev.StepDone)[-1].running == 0
    (body,) = running.replay.bodies
    assert body["token_ids"] == LONG
    assert body["cache_salt"] == SEEDS[0].hex()


async def test_an_error_of_vllm_ends_only_its_request(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "too_long.json").read_bytes())
    running.submit([504] * 5000)
    ended = await running.end()
    assert ended.error_code == "invalid_request"
    assert "maximum model length of 4096" in ended.error_message
    assert ended.computed_tokens == 0
    assert not running.engine.broken.done()


async def test_a_failure_of_a_dying_vllm_is_not_the_end_of_its_requests(running: Running) -> None:
    """Their routers resume them elsewhere when the worker is gone."""
    running.replay.health = b"503 Service Unavailable"
    running.replay.reply = sending(b'data: {"error":{"message":"EngineDeadError","code":500}}\n\n')
    running.submit(FRANCE)
    async with asyncio.timeout(10):
        await running.replay.hung_up.wait()
        assert "EngineDeadError" in await running.engine.broken
    assert running.of(ev.Ended) == []


async def test_a_failure_of_a_healthy_vllm_is_the_end_of_its_request(running: Running) -> None:
    running.replay.reply = sending(b'data: {"error":{"message":"a bug","code":500}}\n\n')
    running.submit(FRANCE)
    assert (await running.end()).error_message == "vLLM failed: a bug"
    assert not running.engine.broken.done()


async def test_a_dead_engine_core_is_noticed_without_requests(running: Running) -> None:
    running.replay.health = b"503 Service Unavailable"
    async with asyncio.timeout(10):
        assert "/health with status 503" in await running.engine.broken


async def test_a_stream_that_breaks_off_is_the_end_of_the_worker(running: Running) -> None:
    recorded = (RECORDED / "logprobs.sse").read_bytes()
    running.replay.reply = sending(recorded[: len(recorded) // 2], end=b"")
    running.submit(FRANCE, logprobs=2)
    async with asyncio.timeout(10):
        assert "closed a stream" in await running.engine.broken
    assert running.of(ev.Ended) == []


async def test_a_cancelled_request_hangs_up_on_vllm(running: Running) -> None:
    async def first_half(writer: asyncio.StreamWriter) -> None:
        recorded = (RECORDED / "length.sse").read_bytes()
        writer.write(HEAD + chunk(recorded[: recorded.index(b"\n\n") + 2]))

    running.replay.reply = first_half
    running.submit(FRANCE)
    async with asyncio.timeout(10):
        while not running.of(ev.Tokens):
            await asyncio.sleep(0.005)
        running.engine.handle(messages.Cancel("r", reason="gone"))
        assert (await running.end()).error_code == "cancelled"
        await running.replay.hung_up.wait()
    assert not running.engine.broken.done()


async def test_each_choice_is_a_request_that_ends_by_itself(running: Running) -> None:
    async def wait(writer: asyncio.StreamWriter) -> None:
        recorded = (RECORDED / "length.sse").read_bytes()
        if len(running.replay.bodies) == 1:
            writer.write(HEAD + chunk(recorded) + END)
            writer.close()

    running.replay.reply = wait
    running.submit(FRANCE, n=2, temperature=1.0, seed=5)
    async with asyncio.timeout(10):
        while not any(run.finish_reason for run in running.of(ev.Tokens)):
            await asyncio.sleep(0.005)
        while len(running.replay.bodies) < 2:
            await asyncio.sleep(0.005)
    assert {body["sampling_params"]["seed"] for body in running.replay.bodies} == {5, 6}
    assert running.of(ev.Ended) == []
    left = {0, 1} - {run.choice for run in running.of(ev.Tokens)}
    running.engine.handle(messages.Cancel("r", tuple(left)))
    assert (await running.end()).error_code == ""


async def test_what_vllm_lacks_is_refused_without_a_try(running: Running) -> None:
    params = SamplingParams(max_tokens=1)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=SEEDS[0], pooling="mean")
    running.engine.handle(
        messages.Submit(request_id="r", prompt_token_ids=pack_tokens(FRANCE), spec=spec)
    )
    assert (await running.end()).error_message == "embeddings are not served by vLLM workers"
    assert running.replay.bodies == []


async def test_a_token_outside_the_vocabulary_never_reaches_vllm(running: Running) -> None:
    """It ends the GPU's kernels, and with them every request."""
    running.submit([*FRANCE, VOCABULARY])
    assert f"token id {VOCABULARY} is outside" in (await running.end()).error_message
    running.reports.clear()
    running.submit(LONG, Kind.REMOTE)
    commit(running, (VOCABULARY,))
    assert (await running.end()).error_code == "invalid_request"
    assert running.replay.bodies == []
    assert running.of(ev.StepDone)[-1].waiting == 0
    assert not running.engine.broken.done()


async def test_scores_of_a_prompt_come_before_its_response(running: Running) -> None:
    replies = [
        sending((RECORDED / "scores_alone.json").read_bytes()),
        sending((RECORDED / "cached.sse").read_bytes()),
    ]

    async def reply(writer: asyncio.StreamWriter) -> None:
        await replies.pop(0)(writer)

    running.replay.reply = reply
    running.submit(PROBE, max_tokens=3, prompt_logprobs=0)
    assert (await running.end()).cached_tokens == 0  # none is read for scores
    (outputs,) = running.of(ev.PromptOutputsReady)
    assert outputs.scores.rows == len(PROBE) - 1
    assert running.reports.index(outputs) < running.reports.index(running.of(ev.Tokens)[0])
    scored, streamed = running.replay.bodies
    assert (scored["token_ids"], scored["sampling_params"]["prompt_logprobs"]) == (PROBE, 0)
    assert streamed["stream"]


async def test_a_response_without_scores_ends_the_request(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "prefill.json").read_bytes())
    running.submit(PROBE, prompt_logprobs=0)
    assert "vLLM sent no log-probabilities" in (await running.end()).error_message


def test_alternatives_are_the_most_likely_tokens_without_the_prompts_own() -> None:
    def row(*ranked: tuple[int, float, int]) -> dict[int, dict[str, float]]:
        return {token: {"logprob": score, "rank": rank} for token, score, rank in ranked}

    rows = [None, row((8, -9.0, 70), (3, -0.5, 1), (4, -1.0, 2)), row((5, -2.0, 2), (9, -0.25, 1))]
    scores = prompt_logprobs(msgspec.json.encode({"prompt_logprobs": rows}), [7, 8, 9], 2)
    read = [
        np.frombuffer(scores.logprobs, "<f4"),
        np.frombuffer(scores.ranks, "<u4"),
        np.frombuffer(scores.top_ids, "<u4"),
        np.frombuffer(scores.top_logprobs, "<f4"),
    ]
    assert [column.tolist() for column in read] == [
        [-9.0, -0.25],
        [70, 1],
        [3, 4, 9, 5],
        [-0.5, -1.0, -0.25, -2.0],
    ]


async def test_the_cache_is_followed_from_its_first_block(running: Running) -> None:
    own = set(block_hashes(SEEDS[0], LONG[:192]))
    async with asyncio.timeout(10):
        held: set[bytes] = set()
        while held != own or len(running.of(ev.CacheChanged)) < 3:
            await asyncio.sleep(0.005)
            held = set()
            for change in running.of(ev.CacheChanged):
                held = (held | set(change.stored)) - set(change.removed)


async def test_a_late_subscription_requests_what_it_missed(running: Running) -> None:
    own = set(block_hashes(SEEDS[0], LONG[:192]))
    async with asyncio.timeout(10):
        while not any(own <= set(change.stored) for change in running.of(ev.CacheChanged)):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("answer", "blocks"), [(True, 0), (False, -1)])
async def test_a_deletion_that_fails_says_so(running: Running, answer: bool, blocks: int) -> None:
    running.replay.live = []
    running.replay.reset = msgspec.json.encode({"success": answer})
    running.engine.handle(messages.EraseBlocks(frozenset({b"abcd"})))
    async with asyncio.timeout(10):
        while not running.of(messages.BlocksErased):
            await asyncio.sleep(0.005)
    (report,) = running.of(messages.BlocksErased)
    assert min(report.blocks["pool"], 0) == blocks


# ---------------------------------------------------------------- hand-offs

PREFILL = (RECORDED / "prefill.json").read_bytes()
PARAMETERS = [protocol.read_chunk(PREFILL).kv_transfer_params]


def commit(running: Running, first: tuple[int | None, ...] = (7,)) -> None:
    """Let the translator load the KV of its only request."""
    (reserved,) = running.of(ev.Reserved)
    data = msgspec.json.encode([*PARAMETERS * len(first)])
    running.engine.handle(messages.Commit("r", reserved.generation, first, data))


async def test_a_prompt_for_another_worker_is_held_until_its_release(running: Running) -> None:
    running.replay.reply = sending(PREFILL)
    running.submit(LONG, Kind.PREFILL, logprobs=2, temperature=0.0)
    done = await running.first(ev.PromptDone)
    (token,) = done.first
    assert len(token.top) == 2
    assert msgspec.json.decode(done.engine_transfer) == PARAMETERS
    assert done.prefill_ns > 0
    assert done.computed_ns > 0
    held = running.of(ev.StepDone)[-1]
    assert (held.running, held.waiting, held.blocks.in_use) == (0, 0, 13)
    assert running.of(ev.Ended) == []
    running.engine.handle(messages.Release("r"))
    assert (await running.end()).error_code == ""
    assert running.of(ev.StepDone)[-1].blocks.in_use == 0
    assert not running.engine.broken.done()


async def test_each_choice_has_its_own_parameters(running: Running) -> None:
    running.replay.reply = sending(PREFILL)
    running.submit(LONG, Kind.PREFILL, n=2, temperature=1.0)
    done = await running.first(ev.PromptDone)
    assert len(done.first) == 2
    assert msgspec.json.decode(done.engine_transfer) == PARAMETERS * 2
    assert len(running.of(ev.PromptDone)) == 1


async def test_a_response_of_one_token_needs_no_transfer(running: Running) -> None:
    plain = msgspec.json.encode({**msgspec.json.decode(PREFILL), "kv_transfer_params": None})
    running.replay.reply = sending(plain)
    running.submit(LONG, Kind.PREFILL, max_tokens=1)
    assert (await running.first(ev.PromptDone)).engine_transfer == b""


async def test_a_vllm_without_the_connector_is_named(running: Running) -> None:
    plain = msgspec.json.encode({**msgspec.json.decode(PREFILL), "kv_transfer_params": None})
    running.replay.reply = sending(plain)
    running.submit(LONG, Kind.PREFILL)
    assert "no NixlConnector" in (await running.end()).error_message


async def test_a_first_token_that_cannot_be_read_ends_the_request(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    running.submit(LONG, Kind.PREFILL)
    assert "which is not a chunk" in (await running.end()).error_message
    assert not running.engine.broken.done()


async def test_a_first_token_of_another_model_ends_the_request(running: Running) -> None:
    answer = msgspec.json.decode(PREFILL)
    answer["choices"][0]["token_ids"] = [VOCABULARY]
    running.replay.reply = sending(msgspec.json.encode(answer))
    running.submit(LONG, Kind.PREFILL)
    assert f"sent token {VOCABULARY}" in (await running.end()).error_message


async def test_a_cancelled_prompt_is_aborted_in_vllm(running: Running) -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        pass

    running.replay.reply = never
    running.submit(LONG, Kind.PREFILL)
    async with asyncio.timeout(10):
        while not running.replay.bodies:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        running.engine.handle(messages.Cancel("r"))
        assert (await running.end()).error_code == "cancelled"
        await running.replay.hung_up.wait()


async def test_a_response_goes_on_behind_the_first_token_of_another_worker(
    running: Running,
) -> None:
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    running.submit(LONG, Kind.REMOTE, max_tokens=4, temperature=0.0)
    waiting = running.of(ev.StepDone)[-1]
    assert (waiting.queued_prompt_tokens, waiting.coming_context) == (0, 200)
    await asyncio.sleep(0.05)
    assert running.replay.bodies == []  # the KV is not there yet
    commit(running)
    ended = await running.end()
    assert (ended.error_code, ended.computed_tokens) == ("", 0)
    (body,) = running.replay.bodies
    assert body["token_ids"] == [*LONG, 7]
    assert body["sampling_params"]["max_tokens"] == 3
    assert body["kv_transfer_params"] == PARAMETERS[0]
    assert [run.index for run in running.of(ev.Tokens)] == [1, 2, 3]
    order = [type(one) for one in running.reports if isinstance(one, ev.Loaded | ev.Tokens)]
    assert order == [ev.Loaded, ev.Tokens, ev.Tokens, ev.Tokens]
    assert running.of(ev.Admitted) == []  # the prefill worker has counted the cached tokens


async def test_a_load_that_fails_waits_for_another_worker(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "load_failed.sse").read_bytes())
    running.submit(LONG, Kind.REMOTE, max_tokens=4, temperature=0.0)
    commit(running)
    failed = await running.first(ev.LoadFailed)
    assert failed.generation == running.of(ev.Reserved)[0].generation
    assert failed.reason
    assert (running.of(ev.Loaded), running.of(ev.Tokens), running.of(ev.Ended)) == ([], [], [])
    assert running.of(ev.StepDone)[-1].running == 1
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    commit(running)
    assert (await running.end()).error_code == ""
    assert [run.index for run in running.of(ev.Tokens)] == [1, 2, 3]
    assert not running.engine.broken.done()


async def test_after_a_load_that_failed_vllm_may_compute_the_prompt(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "load_failed.sse").read_bytes())
    running.submit(LONG, Kind.REMOTE, max_tokens=4, temperature=0.0)
    commit(running)
    await running.first(ev.LoadFailed)
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    running.engine.handle(messages.ComputeLocally("r", (7,)))
    ended = await running.end()
    assert ended.computed_tokens == 200
    assert "kv_transfer_params" not in running.replay.bodies[-1]
    assert running.replay.bodies[-1]["token_ids"] == [*LONG, 7]
    assert [run.index for run in running.of(ev.Tokens)] == [1, 2, 3]


async def test_a_prompt_without_a_first_token_is_computed_from_its_start(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    running.submit(LONG, Kind.REMOTE, max_tokens=3, temperature=0.0)
    running.engine.handle(messages.ComputeLocally("r", None))
    await running.end()
    assert running.replay.bodies[-1]["token_ids"] == LONG
    assert [run.index for run in running.of(ev.Tokens)] == [0, 1, 2]


async def test_no_choice_is_reported_before_the_kv_of_all_has_come(running: Running) -> None:
    gate = asyncio.Event()

    async def one_by_one(writer: asyncio.StreamWriter) -> None:
        if len(running.replay.bodies) == 2:
            await gate.wait()
        writer.write(HEAD + chunk((RECORDED / "length.sse").read_bytes()) + END)
        writer.close()

    running.replay.reply = one_by_one
    running.submit(LONG, Kind.REMOTE, max_tokens=4, n=2, temperature=1.0)
    commit(running, (7, 8))
    await asyncio.sleep(0.2)
    assert running.of(ev.Tokens) == []
    gate.set()
    assert (await running.end()).error_code == ""
    for choice in (0, 1):
        runs = [run.index for run in running.of(ev.Tokens) if run.choice == choice]
        assert runs == [1, 2, 3]


async def test_the_choices_that_remain_do_not_wait_for_a_cancelled_one(running: Running) -> None:
    gate = asyncio.Event()

    async def one_by_one(writer: asyncio.StreamWriter) -> None:
        if len(running.replay.bodies) == 2:  # the second choice never begins
            await gate.wait()
        writer.write(HEAD + chunk((RECORDED / "length.sse").read_bytes()) + END)
        writer.close()

    running.replay.reply = one_by_one
    running.submit(LONG, Kind.REMOTE, max_tokens=4, n=2, temperature=1.0)
    commit(running, (7, 8))
    await asyncio.sleep(0.2)
    assert running.of(ev.Tokens) == []
    begun = running.replay.bodies[0]["request_id"]
    running.engine.handle(messages.Cancel("r", choices=(0 if begun.endswith("1") else 1,)))
    async with asyncio.timeout(5):
        assert (await running.end()).error_code == ""
    assert {run.choice for run in running.of(ev.Tokens)} == {1 if begun.endswith("1") else 0}
    gate.set()


async def test_a_choice_that_has_ended_is_not_loaded(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    running.submit(LONG, Kind.REMOTE, max_tokens=4, n=2, temperature=1.0)
    commit(running, (None, 8))
    await running.end()
    assert {run.choice for run in running.of(ev.Tokens)} == {1}


async def test_a_load_without_an_end_is_given_up(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)

    monkeypatch.setattr(engine, "_LOAD_S", 0.1)
    running.replay.reply = never
    running.submit(LONG, Kind.REMOTE, max_tokens=4)
    commit(running)
    assert "no KV within" in (await running.first(ev.LoadFailed)).reason
    async with asyncio.timeout(10):
        await running.replay.hung_up.wait()  # by which vLLM aborts the request
    running.engine.handle(messages.Cancel("r"))
    assert (await running.end()).error_code == "cancelled"


async def test_without_a_hand_off_prompts_of_other_workers_are_refused(running: Running) -> None:
    running.engine._hands_over = False
    running.submit(LONG, Kind.REMOTE)
    assert "do not hand over KV" in (await running.end()).error_message
