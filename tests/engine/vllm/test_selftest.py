"""Self-test for ``exact``: recorded scores of a real vLLM, and a server that lies on one path."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm import selftest, server
from baton.engine.vllm.selftest import Response, check_equal, probes, prove_exact, scores_of
from baton.types.errors import InternalError
from tests.engine.vllm.record import PROBE
from tests.engine.vllm.test_engine import HEAD, RECORDED, chunk, facts
from tests.workers.vllm_program import VOCABULARY, Scored

FACTS = msgspec.structs.replace(facts(""), batch_invariant=True, step_tokens=1400)
Lie = Callable[["Server", dict[str, Any]], bool]


def recorded(name: str) -> selftest.Scores:
    data = (RECORDED / f"scores_{name}.json").read_bytes()
    return scores_of(msgspec.json.decode(data, type=Response), PROBE)


class Server:
    """A batch-invariant model: scores depend on the tokens before them, unless it lies."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self.lies: Lie = lambda server, body: False
        self.status = b"200 OK"
        self.scored = Scored()
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()
        self.waiting: list[int] = []
        self.calls: list[str] = []

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            target = head.split(b" ", 2)[1].decode()
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
            body = await reader.readexactly(length)
            self.calls.append(target)
            if target.startswith("/pause"):
                self.paused.set()
            elif target == "/resume":
                self.paused.clear()
                self.resumed.set()
            answer = await self.scores(body) if body else b"{}"
            writer.write(HEAD.replace(b"200 OK", self.status) + chunk(answer) + b"0\r\n\r\n")

    async def scores(self, body: bytes) -> bytes:
        request = msgspec.json.decode(body)
        lies = self.lies(self, request)
        if self.paused.is_set():
            self.waiting.append(len(request["token_ids"]))
            await self.resumed.wait()
        return self.scored.response(request, lies=lies)


@pytest.fixture
async def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(selftest, "_QUEUED_S", 0.1)
    one = Server(str(tmp_path / "http"))
    listening = await asyncio.start_unix_server(one.http, one.socket)
    yield one
    listening.close()


def test_a_real_vllm_gives_equal_bits_to_equal_computations_only() -> None:
    """Recorded on a CPU without the batch-invariant mode."""
    alone = recorded("alone")
    assert sorted(alone) == [*range(1, len(PROBE) + 4)]
    check_equal("in a batch", [alone], [recorded("alone")])
    with pytest.raises(InternalError, match=r"numerics: exact: \d+ of 43 tokens in a batch differ"):
        check_equal("in a batch", [alone], [recorded("batch")])
    cached = recorded("cached")
    assert sorted(cached) == [*range(len(PROBE), len(PROBE) + 4)]


def test_the_lowest_bit_of_one_log_probability_is_found() -> None:
    alone = recorded("alone")
    token, value = alone[7]
    changed = {**alone, 7: (token, value * (1 + 2**-52))}
    with pytest.raises(InternalError, match=r" 1 of 43 tokens behind .*; set `numerics: fast`"):
        check_equal("behind a cached prefix", [alone], [changed])
    other_token = {**alone, 7: (token + 1, value)}
    with pytest.raises(InternalError, match=f"and token {token + 1} has"):
        check_equal("in a batch", [alone], [other_token])


def test_the_prompts_of_a_batch_exceed_a_step() -> None:
    lengths = [len(one) for one in probes(FACTS, VOCABULARY)]
    assert sum(lengths[1:]) > FACTS.step_tokens
    assert len({length % FACTS.block_tokens for length in lengths}) > 4
    small = msgspec.structs.replace(FACTS, max_context_tokens=64)
    assert max(len(one) for one in probes(small, VOCABULARY)) + 8 <= 64
    few = msgspec.structs.replace(FACTS, blocks=64)  # all fit into the pool together
    assert sum(len(one) + 8 for one in probes(few, VOCABULARY)) <= 64 * FACTS.block_tokens


async def test_a_server_that_keeps_exact_passes(vllm: Server) -> None:
    first = await prove_exact(HttpOrigin.of_socket(vllm.socket), FACTS, VOCABULARY)
    assert len(vllm.waiting) == 8  # all prompts were queued before the first one began
    assert sum(vllm.waiting) > FACTS.step_tokens
    assert vllm.calls[-1] == "/reset_prefix_cache"
    proven = msgspec.structs.replace(FACTS, exact=first)
    assert proven.numerics_id == f"{FACTS.numerics_id}/tp1/exact/{first}"
    smaller = msgspec.structs.replace(FACTS, step_tokens=700, blocks=300)
    assert await prove_exact(HttpOrigin.of_socket(vllm.socket), smaller, VOCABULARY) == first
    vllm.scored.bias = 0.1  # equal on all paths, as on another CPU
    assert await prove_exact(HttpOrigin.of_socket(vllm.socket), FACTS, VOCABULARY) != first


@pytest.mark.parametrize(
    ("path", "lies"),
    [
        ("in a batch", lambda server, body: server.paused.is_set()),
        ("behind a cached prefix", lambda server, body: body["cache_salt"] in server.scored.salts),
        ("in a resumed response", lambda server, body: body["sampling_params"]["max_tokens"] < 8),
    ],
)
async def test_a_path_with_other_bits_is_refused_by_name(
    vllm: Server, path: str, lies: Lie
) -> None:
    vllm.lies = lies
    with pytest.raises(InternalError, match=f"numerics: exact: .* tokens {path} differ"):
        await prove_exact(HttpOrigin.of_socket(vllm.socket), FACTS, VOCABULARY)


async def test_a_vllm_that_fails_in_its_mode_is_refused(vllm: Server) -> None:
    vllm.status = b"500 Internal Server Error"
    with pytest.raises(InternalError, match="vLLM fails in its batch-invariant mode"):
        await prove_exact(HttpOrigin.of_socket(vllm.socket), FACTS, VOCABULARY)


async def test_a_vllm_that_caches_nothing_is_refused(vllm: Server) -> None:
    vllm.scored.caches = False
    with pytest.raises(InternalError, match="has cached no prefix"):
        await prove_exact(HttpOrigin.of_socket(vllm.socket), FACTS, VOCABULARY)


async def test_a_mode_that_is_off_is_refused_before_any_prompt(vllm: Server) -> None:
    off = msgspec.structs.replace(FACTS, batch_invariant=False)
    with pytest.raises(InternalError, match="batch-invariant mode is off"):
        await prove_exact(HttpOrigin.of_socket(vllm.socket), off, VOCABULARY)
    assert vllm.calls == []


def test_the_mode_is_turned_on_unless_the_environment_has_it_off() -> None:
    engine = server.ExternalEngine(kind="vllm", python="python", batch_invariant=True)
    assert server.environment({}, 1, engine)["VLLM_BATCH_INVARIANT"] == "1"
    outer = {"VLLM_BATCH_INVARIANT": "0"}
    assert server.environment(outer, 1, engine)["VLLM_BATCH_INVARIANT"] == "0"
    fast = msgspec.structs.replace(engine, batch_invariant=False)
    assert "VLLM_BATCH_INVARIANT" not in server.environment({}, 1, fast)
