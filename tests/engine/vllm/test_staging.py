"""Hand-offs of the translator by Baton's own transports, beside sockets that repeat vLLM's."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.engine.remote.live_request import LiveRequest, Saved
from baton.engine.vllm.facts import hand_off_id
from baton.engine.vllm.hand_off_baton import BatonHandOff
from baton.engine.vllm.server import GENERATIONS, SAVES
from baton.engine.vllm.staging import Staging
from baton.types import events as ev
from baton.types.params import SamplingParams
from tests.engine.vllm import test_engine
from tests.engine.vllm.record import LONG, SEEDS
from tests.engine.vllm.test_engine import (
    BLOCKS,
    END,
    HEAD,
    RECORDED,
    Replay,
    Running,
    chunk,
    sending,
    translating,
)

HAND_OFF = f"{hand_off_id('baton', 32, 1)}/amx"
PAGES = 13  # of 200 tokens
LAYERS = 5
WHOLE = 12  # of them in whole blocks of vLLM, which have 32 tokens
PREFILL = msgspec.json.decode((RECORDED / "prefill.json").read_bytes())
SAVED = msgspec.json.encode({**PREFILL, "kv_transfer_params": {"saved_tokens": len(LONG)}})


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    make_generations(tmp_path)
    async with translating(Replay(tmp_path), HAND_OFF) as running:
        yield running


def make_generations(folder: Path) -> None:
    (folder / GENERATIONS).write_bytes(bytes(8 * BLOCKS))


async def bound(running: Running) -> tuple[int, ...]:
    """Let the translator bind the pages of its only reservation."""
    (reserved,) = running.of(ev.Reserved)
    assert reserved.skip_blocks == 0
    running.engine.handle(messages.Bind("r", reserved.generation))
    blocks: tuple[int, ...] = (await running.first(ev.Bound)).blocks
    return blocks


def commit(running: Running) -> None:
    (reserved,) = running.of(ev.Reserved)
    running.engine.handle(messages.Commit("r", reserved.generation, (7,)))


def used(staging: Staging) -> int:
    return len(staging._generations) - len(staging._free)


def used_pages(running: Running) -> int:
    hand_off = running.engine._hand_off
    assert isinstance(hand_off, BatonHandOff)
    return used(hand_off._staging)


async def test_a_prompt_is_published_when_vllm_has_saved_it(running: Running) -> None:
    running.replay.reply = sending(SAVED)
    running.submit(LONG, Kind.PREFILL, temperature=0.0)
    done = await running.first(ev.PromptDone)
    assert done.engine_transfer == b""
    (body,) = running.replay.bodies
    (admitted,) = running.of(ev.Admitted)
    assert len(admitted.blocks) == PAGES
    assert body["kv_transfer_params"] == {
        "save_pages": [*admitted.blocks[:WHOLE]],
        "first_token": 0,
        "generation": 1,
    }
    (published,) = running.of(ev.Published)
    assert (published.block_begin, published.block_count) == (0, PAGES)
    assert (published.layer_count, published.valid_tokens) == (ev.ALL_LAYERS, len(LONG))
    assert used_pages(running) == PAGES
    running.engine.handle(messages.Release("r"))
    assert (await running.end()).error_code == ""
    assert used_pages(running) == 0


SAVING = msgspec.json.encode(
    {**PREFILL, "kv_transfer_params": {"saving_pages": WHOLE, "saved_tokens": len(LONG)}}
)


@pytest.fixture
def report(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Send the translator what vLLM's connector reports on the first hand-off."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:

        def report(pages: int, rank: int = 0, layers: int = LAYERS) -> None:
            packed = struct.pack("<qqqqq", 1, pages, layers, LAYERS, rank)
            reports.sendto(packed, str(tmp_path / SAVES))

        yield report


async def test_a_prompt_that_vllm_still_saves_is_not_done(
    running: Running, report: Callable[..., None]
) -> None:
    running.replay.reply = sending(SAVING)
    running.submit(LONG, Kind.PREFILL)
    await asyncio.sleep(0.1)
    report(4)
    await asyncio.sleep(0.05)
    assert [one.block_count for one in running.of(ev.Published)] == [4]
    assert running.of(ev.PromptDone) == []
    report(WHOLE)
    await running.first(ev.PromptDone)
    assert sum(one.block_count for one in running.of(ev.Published)) == PAGES


async def test_pages_of_a_cancelled_prompt_are_kept_until_vllm_has_saved_it(
    running: Running, report: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    running.replay.reply = sending(SAVING)
    running.submit(LONG, Kind.PREFILL)
    await asyncio.sleep(0.1)
    running.engine.handle(messages.Cancel("r"))
    await running.end()
    report(4)
    await asyncio.sleep(0.05)
    assert running.of(ev.Published) == []
    assert used_pages(running) == PAGES
    report(WHOLE)
    await asyncio.sleep(0.05)
    assert used_pages(running) == 0
    assert running.of(ev.PromptDone) == []
    assert caplog.records == []


async def test_a_prompt_that_vllm_cannot_save_fails(
    running: Running, report: Callable[..., None]
) -> None:
    async def late(writer: asyncio.StreamWriter) -> None:
        report(-1)
        report(WHOLE)
        await asyncio.sleep(0.05)
        await sending(SAVING)(writer)

    running.replay.reply = late
    running.submit(LONG, Kind.PREFILL)
    ended = await running.end()
    assert "cannot save the KV" in ended.error_message
    assert running.of(ev.Published) == []
    assert used_pages(running) == 0


@pytest.fixture
async def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    make_generations(tmp_path)
    facts = msgspec.structs.replace(test_engine.facts(HAND_OFF), width=2)
    monkeypatch.setattr(test_engine, "facts", lambda hand_off: facts)
    async with translating(Replay(tmp_path), HAND_OFF) as running:
        running.replay.reply = sending(SAVING)
        yield running


async def test_a_page_is_published_when_all_ranks_have_saved_it(
    two_ranks: Running, report: Callable[..., None]
) -> None:
    published: list[int] = []
    two_ranks.submit(LONG, Kind.PREFILL)
    await asyncio.sleep(0.1)
    for pages, rank in ((4, 0), (2, 1), (8, 1), (WHOLE, 1)):
        report(pages, rank)
        await asyncio.sleep(0.05)
        published.append(sum(one.block_count for one in two_ranks.of(ev.Published)))
    assert published == [0, 2, 4, 4]
    assert len(two_ranks.of(ev.Admitted)) == 1
    assert two_ranks.of(ev.PromptDone) == []
    report(WHOLE, 0)
    await two_ranks.first(ev.PromptDone)
    assert sum(one.block_count for one in two_ranks.of(ev.Published)) == PAGES


def rectangles(running: Running) -> list[tuple[int, int, int, int]]:
    """Return first layer, number of layers, first page and number of pages of all reports."""
    return [
        (one.layer_begin, one.layer_count, one.block_begin, one.block_count)
        for one in running.of(ev.Published)
    ]


async def test_layers_are_published_while_the_step_computes_the_others(
    running: Running, report: Callable[..., None]
) -> None:
    running.replay.reply = sending(SAVING)
    running.submit(LONG, Kind.PREFILL)
    await asyncio.sleep(0.1)
    for pages, layers in ((4, 2), (4, 3), (4, 3), (4, LAYERS), (WHOLE, 1), (WHOLE, LAYERS)):
        report(pages, layers=layers)
    await running.first(ev.PromptDone)
    assert len(running.of(ev.Admitted)) == 1
    assert rectangles(running) == [
        (0, 2, 0, 4),
        (2, 1, 0, 4),
        (3, 2, 0, 4),
        (0, 1, 4, 8),
        (1, 4, 4, 8),
        (0, ev.ALL_LAYERS, WHOLE, PAGES - WHOLE),
    ]


async def test_layers_behind_a_lost_report_are_published_with_all_others(
    running: Running, report: Callable[..., None]
) -> None:
    running.replay.reply = sending(SAVING)
    running.submit(LONG, Kind.PREFILL)
    await asyncio.sleep(0.1)
    report(4, layers=2)
    report(8, layers=3)  # the step before is complete by now
    await asyncio.sleep(0.05)
    assert rectangles(running) == [(0, 2, 0, 4)]
    report(WHOLE)
    await running.first(ev.PromptDone)
    assert rectangles(running)[1:3] == [(2, 3, 0, 4), (0, ev.ALL_LAYERS, 4, WHOLE - 4)]


async def test_a_layer_is_published_when_all_ranks_have_saved_it(
    two_ranks: Running, report: Callable[..., None]
) -> None:
    two_ranks.submit(LONG, Kind.PREFILL)
    await asyncio.sleep(0.1)
    counts: list[int] = []
    for pages, rank, layers in ((4, 0, 3), (4, 1, 1), (4, 0, LAYERS), (8, 0, 4), (4, 1, 2)):
        report(pages, rank, layers)
        await asyncio.sleep(0.05)
        counts.append(len(two_ranks.of(ev.Published)))
    assert counts == [0, 1, 1, 1, 2]
    report(4, 1)
    report(8, 1, 2)
    await asyncio.sleep(0.05)
    assert rectangles(two_ranks) == [(0, 1, 0, 4), (1, 1, 0, 4), (2, 3, 0, 4), (0, 2, 4, 4)]
    assert two_ranks.of(ev.PromptDone) == []
    report(WHOLE, 0)
    report(WHOLE, 1)
    await two_ranks.first(ev.PromptDone)


async def test_a_prompt_that_one_rank_cannot_save_fails(
    two_ranks: Running, report: Callable[..., None]
) -> None:
    two_ranks.submit(LONG, Kind.PREFILL)
    await asyncio.sleep(0.1)
    report(-1, 1)
    report(WHOLE, 0)
    assert "cannot save the KV" in (await two_ranks.end()).error_message
    assert two_ranks.of(ev.Published) == []
    assert used_pages(two_ranks) == 0


async def test_pages_that_one_rank_cannot_save_are_kept_until_the_other_writes_no_more(
    two_ranks: Running, report: Callable[..., None]
) -> None:
    two_ranks.submit(LONG, Kind.PREFILL)
    await asyncio.sleep(0.1)
    two_ranks.engine.handle(messages.Cancel("r"))
    await two_ranks.end()
    report(-1, 1)
    report(4, 0)
    await asyncio.sleep(0.05)
    assert used_pages(two_ranks) == PAGES
    report(WHOLE, 0)
    await asyncio.sleep(0.05)
    assert used_pages(two_ranks) == 0


async def test_what_vllm_has_saved_is_published_while_it_computes_the_rest(
    running: Running, tmp_path: Path
) -> None:
    gate = asyncio.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(HEAD + chunk(SAVED) + END)
        writer.close()

    async def report(generation: int, pages: int) -> None:
        packed = struct.pack("<qqqqq", generation, pages, LAYERS, LAYERS, 0)
        reports.sendto(packed, str(tmp_path / SAVES))
        await asyncio.sleep(0.05)

    def published() -> list[tuple[int, int, int]]:
        rectangles = running.of(ev.Published)
        return [(one.block_begin, one.block_count, one.valid_tokens) for one in rectangles]

    running.replay.reply = late
    running.submit(LONG, Kind.PREFILL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
        await report(1, 4)
        await report(2, 8)  # of another hand-off
        await report(1, 10)
        await report(1, 10)
        assert published() == [(0, 4, 64), (4, 6, 96)]
        assert len(running.of(ev.Admitted)) == 1
        gate.set()
        await running.first(ev.PromptDone)
        assert published()[2:] == [(10, 3, len(LONG) - 160)]
        running.engine.handle(messages.Release("r"))
        await running.end()
        await report(1, 12)  # late: its pages may be those of another prompt
        assert len(published()) == 3


async def test_a_prompt_that_vllm_did_not_save_is_not_published(running: Running) -> None:
    running.replay.reply = sending(msgspec.json.encode({**PREFILL, "kv_transfer_params": None}))
    running.submit(LONG, Kind.PREFILL)
    assert "saved None of 200 prompt tokens" in (await running.end()).error_message
    assert running.of(ev.Published) == []
    assert used_pages(running) == 0


async def test_one_choice_saves_the_prompt_for_all(running: Running) -> None:
    running.replay.reply = sending(SAVED)
    running.submit(LONG, Kind.PREFILL, n=2, temperature=1.0)
    assert len((await running.first(ev.PromptDone)).first) == 2
    asked = [body.get("kv_transfer_params") for body in running.replay.bodies]
    assert sum(one is not None for one in asked) == 1


async def test_the_pages_of_a_cancelled_prompt_stay_until_vllm_writes_no_more(
    running: Running,
) -> None:
    gate = asyncio.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(HEAD + chunk(SAVED) + END)
        writer.close()

    running.replay.reply = late
    running.submit(LONG, Kind.PREFILL)
    async with asyncio.timeout(10):
        while not running.replay.bodies:
            await asyncio.sleep(0.005)
    running.engine.handle(messages.Cancel("r"))
    assert (await running.end()).error_code == "cancelled"
    assert used_pages(running) == PAGES
    running.engine._hand_off._saved(1, Saved(4), 0)
    assert running.of(ev.Published) == []
    gate.set()
    async with asyncio.timeout(10):
        while used_pages(running):
            await asyncio.sleep(0.005)
    assert running.of(ev.PromptDone) == []


async def test_the_pages_of_an_aborted_prompt_stay_until_each_rank_has_reported_its_end(
    two_ranks: Running, report: Callable[..., None]
) -> None:
    gate = asyncio.Event()
    (choice,) = PREFILL["choices"]
    aborted = {**PREFILL, "choices": [{**choice, "finish_reason": "abort", "token_ids": []}]}

    async def late(writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(HEAD + chunk(msgspec.json.encode(aborted)) + END)
        writer.close()

    two_ranks.replay.reply = late
    two_ranks.submit(LONG, Kind.PREFILL)
    async with asyncio.timeout(10):
        while not two_ranks.replay.bodies:
            await asyncio.sleep(0.005)
    two_ranks.engine.handle(messages.Cancel("r"))
    assert (await two_ranks.end()).error_code == "cancelled"
    async with asyncio.timeout(10):
        while not two_ranks.replay.aborted:
            await asyncio.sleep(0.005)
    (body,) = two_ranks.replay.bodies
    assert two_ranks.replay.aborted == [f"generate-tokens-{body['request_id']}"]
    report(0, rank=0, layers=-1)
    gate.set()
    await asyncio.sleep(0.1)
    assert used_pages(two_ranks) == PAGES
    report(0, rank=1, layers=-1)
    async with asyncio.timeout(10):
        while used_pages(two_ranks):
            await asyncio.sleep(0.005)
    assert two_ranks.of(ev.PromptDone) == []


async def test_a_response_goes_on_behind_pages_that_vllm_loads(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    running.submit(LONG, Kind.REMOTE, max_tokens=4, temperature=0.0)
    pages = await bound(running)
    assert len(set(pages)) == PAGES
    await asyncio.sleep(0.05)
    assert running.replay.bodies == []  # the KV is not there yet
    commit(running)
    ended = await running.end()
    assert (ended.error_code, ended.computed_tokens) == ("", 0)
    (body,) = running.replay.bodies
    assert body["token_ids"] == [*LONG, 7]
    assert body["kv_transfer_params"] == {
        "load_pages": [*pages[:WHOLE]],
        "first_token": 0,
        "generation": 1,
    }
    assert [run.index for run in running.of(ev.Tokens)] == [1, 2, 3]
    assert used_pages(running) == 0


async def test_cached_leading_blocks_are_neither_requested_nor_loaded(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    await running.until_cached()
    running.submit([*LONG, *range(100)], Kind.REMOTE, max_tokens=4, temperature=0.0)
    (reserved,) = running.of(ev.Reserved)
    assert reserved.skip_blocks == WHOLE
    running.engine.handle(messages.Bind("r", reserved.generation))
    pages = (await running.first(ev.Bound)).blocks
    assert len(pages) == 19  # of 300 tokens
    assert used_pages(running) == len(set(pages[WHOLE:])) == 7
    commit(running)
    assert (await running.end()).error_code == ""
    (body,) = running.replay.bodies
    assert body["kv_transfer_params"]["load_pages"] == [*pages[WHOLE:18]]
    assert body["kv_transfer_params"]["first_token"] == 192
    assert used_pages(running) == 0


async def test_blocks_that_the_decode_worker_has_are_neither_saved_nor_published(
    running: Running,
) -> None:
    running.replay.reply = sending(SAVED)
    running.submit(LONG, Kind.PREFILL, skip_blocks=5)  # in the middle of a block of vLLM
    await running.first(ev.PromptDone)
    (body,) = running.replay.bodies
    (admitted,) = running.of(ev.Admitted)
    assert body["kv_transfer_params"]["save_pages"] == [*admitted.blocks[4:WHOLE]]
    assert body["kv_transfer_params"]["first_token"] == 64
    assert rectangles(running) == [(0, ev.ALL_LAYERS, 5, PAGES - 5)]
    assert used_pages(running) == PAGES - 4
    running.engine.handle(messages.Release("r"))
    await running.end()
    assert used_pages(running) == 0


async def test_a_source_publishes_cached_blocks_and_computes_one_token(running: Running) -> None:
    whole = {"kv_transfer_params": {"saved_tokens": 193}}
    running.replay.reply = sending(msgspec.json.encode({**PREFILL, **whole}))
    await running.until_cached()
    running.submit(LONG[:192], Kind.HELD, skip_blocks=4, max_tokens=2)
    done = await running.first(ev.PromptDone)
    assert done.first == ()
    (body,) = running.replay.bodies
    assert (len(body["token_ids"]), body["sampling_params"]["max_tokens"]) == (193, 1)
    (admitted,) = running.of(ev.Admitted)
    assert body["kv_transfer_params"]["save_pages"] == [*admitted.blocks[4:WHOLE]]
    assert rectangles(running) == [(0, ev.ALL_LAYERS, 4, WHOLE - 4)]
    running.engine.handle(messages.Release("r"))
    assert (await running.end()).error_code == ""
    assert used_pages(running) == 0


@pytest.mark.parametrize("prompt", [LONG, range(500), LONG[:10]])
async def test_a_source_without_the_blocks_computes_nothing(
    running: Running, prompt: list[int]
) -> None:
    await running.until_cached()
    running.submit([*prompt, *prompt], Kind.HELD, max_tokens=2)
    ended = await running.end()
    assert ended.error_code == "unavailable"
    assert "does not have the blocks" in ended.error_message
    assert (running.replay.bodies, used_pages(running)) == ([], 0)


@pytest.mark.parametrize("status", [b"200 OK", b"500 Internal Server Error"])
async def test_a_pulled_prefix_is_loaded_behind_what_is_cached(
    running: Running, status: bytes
) -> None:
    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.replace(b"200 OK", status) + chunk(b"{}") + END)
        writer.close()

    running.replay.reply = reply
    await running.until_cached()
    prompt = [*LONG[:192], *range(64)]
    running.submit(prompt, Kind.REMOTE, emitted=(None,), max_tokens=2)
    (reserved,) = running.of(ev.Reserved)
    running.engine.handle(messages.Bind("r", reserved.generation))
    pages = (await running.first(ev.Bound)).blocks
    running.engine.handle(messages.Commit("r", reserved.generation, ()))
    ended = await running.end()
    assert ended.error_code == ("" if status.startswith(b"200") else "unavailable")
    (body,) = running.replay.bodies
    assert body["token_ids"] == [*prompt, prompt[-1]]
    assert body["kv_transfer_params"]["load_pages"] == [*pages[WHOLE:16]]
    assert running.of(ev.Tokens) == []
    assert used_pages(running) == 0


async def test_what_vllm_cannot_load_is_computed(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "load_failed.sse").read_bytes())
    running.submit(LONG, Kind.REMOTE, max_tokens=4, temperature=0.0)
    await bound(running)
    commit(running)
    async with asyncio.timeout(10):
        while not running.replay.bodies:
            await asyncio.sleep(0.005)
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    ended = await running.end()
    assert (ended.error_code, ended.computed_tokens) == ("", 200)
    failed, computed = running.replay.bodies
    assert "kv_transfer_params" in failed
    assert "kv_transfer_params" not in computed
    assert computed["token_ids"] == [*LONG, 7]
    assert [run.index for run in running.of(ev.Tokens)] == [1, 2, 3]
    assert used_pages(running) == 0


async def test_a_prompt_whose_kv_did_not_come_gives_its_pages_back(running: Running) -> None:
    running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
    running.submit(LONG, Kind.REMOTE, max_tokens=4)
    await bound(running)
    running.engine.handle(messages.ComputeLocally("r", (7,)))
    assert used_pages(running) == 0
    assert (await running.end()).computed_tokens == 200


async def test_a_prompt_without_free_pages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_generations(tmp_path)
    facts = msgspec.structs.replace(test_engine.facts(HAND_OFF), blocks=(PAGES - 1) // 2)
    monkeypatch.setattr(test_engine, "facts", lambda hand_off: facts)
    async with translating(Replay(tmp_path), HAND_OFF) as running:
        running.submit(LONG, Kind.PREFILL)
        ended = await running.end()
        assert ended.error_code == "unavailable"
        assert "has no more room" in ended.error_message
        assert running.replay.bodies == []


async def test_a_reservation_waits_for_free_pages() -> None:
    def live(name: str) -> LiveRequest:
        spec = RequestSpec(kind=Kind.FULL, params=SamplingParams(max_tokens=4), hash_seed=SEEDS[0])
        submit = messages.Submit(request_id=name, prompt_token_ids=b"", spec=spec)
        return LiveRequest(submit, LONG, generation=len(name))

    generations = np.zeros(PAGES + 1, np.int64)
    staging = Staging(generations, 32)
    saved = live("saved")
    first = live("first")
    second = live("second")
    assert staging.take(saved, 0)
    assert staging.bind(first) == []
    assert staging.bind(second) == []
    assert staging.release(saved) == []  # vLLM may write yet
    staging.saved(saved)
    (bound,) = staging.release(saved)
    assert (bound.request_id, len(bound.blocks)) == ("first", PAGES)
    assert [*generations] == [len("first")] * PAGES + [0]
    assert staging.release(second) == []  # does not wait any more
    assert staging.release(first) == []
    assert used(staging) == 0
    assert not generations.any()
