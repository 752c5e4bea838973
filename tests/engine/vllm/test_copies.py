"""Copies between vLLM's blocks and Baton's pages, on a device whose copies are slow.

The device has streams and events in place of those of ``torch.cuda``. Writes of a stream become
visible when a thread waits for a later event of that stream. vLLM's step is computed when a stream
waits for it.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.vllm.hand_off_baton import SaveReports
from tests.engine.vllm.test_inside import connectors, copies, engine_step, vllm_config

LAYERS, BLOCKS, HEADS, TOKENS, VALUES = 3, 8, 2, 32, 16
PAGES = BLOCKS * TOKENS // 16
HEAD_BYTES = 8 * VALUES * 2  # of bf16, half a page
PAGE_BYTES = 2 * HEADS * HEAD_BYTES


class FullAttentionSpec:
    """Stand-in for vLLM's, which is found by its name."""


class SlidingWindowSpec:
    """Stand-in for vLLM's."""


class Event:
    def __init__(self, device: "Device") -> None:
        self._device = device
        self._stream: Stream | None = None

    def record(self, stream: "Stream") -> None:
        self._stream = stream
        self._device.recorded(self, stream)

    def synchronize(self) -> None:
        assert self._device.gate.wait(10)
        assert self._stream is not None
        self._stream.arrive(self)


class Stream:
    def __init__(self) -> None:
        self.pending: list[tuple[Event, Callable[[], None]]] = []

    def arrive(self, event: Event) -> None:
        """Show what this stream has written before an event."""
        if any(one is event for one, _ in self.pending):
            while True:
                first, show = self.pending.pop(0)
                show()
                if first is event:
                    return

    def wait_event(self, event: Event) -> None:
        assert event._stream is not None
        event._stream.arrive(event)


class Device:
    """Streams and events as of ``torch.cuda``.

    Attributes:
        gate: While it is not set, no wait for an event returns.
        buffers: Pinned buffers, in which the host and the device meet.
    """

    def __init__(self, layers: list[torch.Tensor]) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.buffers: list[torch.Tensor] = []
        self._layers = layers
        self._computes = Stream()
        self._compute: Callable[[], None] = lambda: None
        self._before: list[torch.Tensor] = []

    def computes(self, compute: Callable[[], None]) -> None:
        """Let vLLM start to compute; it ends when a stream waits for it."""
        self._compute = compute

    def end(self) -> None:
        """Compute the steps that no stream has waited for."""
        for _, compute in self._computes.pending:
            compute()

    def pinned(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.buffers.append(torch.zeros(shape, dtype=torch.uint8))
        return self.buffers[-1]

    def Stream(self, device: object) -> Stream:
        return Stream()

    def Event(self, blocking: bool = False) -> Event:
        return Event(self)

    def current_stream(self, device: object) -> Stream:
        return self._computes

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._before = [one.clone() for one in self._tensors]
        yield

    def recorded(self, event: Event, stream: Stream) -> None:
        """Hide what the stream has written; it reads its buffers as late as it writes."""
        if stream is self._computes:
            stream.pending.append((event, self._compute))
            return
        shows: list[Callable[[], None]] = []
        for tensor, before in zip(self._tensors, self._before, strict=True):
            written = tensor != before
            if written.any():
                shows.append(partial(self._show, tensor, written, tensor.clone()))
                tensor.copy_(before)
        stream.pending.append((event, lambda: [show() for show in shows] and None))

    def _show(self, tensor: torch.Tensor, written: torch.Tensor, value: torch.Tensor) -> None:
        if any(tensor is layer for layer in self._layers):
            sources = {bytes(one.flatten()) for buffer in self.buffers for one in buffer}
            for block in value.transpose(1, 2)[written.flatten(1).any(1)]:
                assert bytes(block.flatten()) in sources, "a buffer was used again on its way"
        tensor[written] = value[written]

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [*self.buffers, *self._layers]


def flash_caches() -> dict[str, torch.Tensor]:
    """Return random KV as vLLM gives FlashAttention: [B, H, N, C], in memory [B, N, H, C]."""
    shape = (BLOCKS, TOKENS, HEADS, VALUES)
    return {f"layer {n}": torch.randn(shape).bfloat16().transpose(1, 2) for n in range(LAYERS)}


def in_pages(block: torch.Tensor) -> torch.Tensor:
    """Return the two pages of a block ``[heads, tokens, bytes]``, each with its halves."""
    return block.reshape(HEADS, 2, 2, HEAD_BYTES).permute(1, 2, 0, 3)


def config(spec: object = None) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec or FullAttentionSpec())]
    )


class Gpu:
    """A ``CudaCopies`` beside its blocks, its pages and the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, buffer_blocks: int) -> None:
        torch.manual_seed(3)
        caches = flash_caches()
        self.layers, self.order = module.CudaCopies.layers_and_order(caches, None, config())
        self.pool = torch.zeros((LAYERS, 2, PAGES, HEADS, HEAD_BYTES), dtype=torch.uint8)
        self.device = Device(self.layers)
        monkeypatch.setattr(module, "_pinned", self.device.pinned)
        monkeypatch.setattr(module, "_BUFFER_BYTES", buffer_blocks * 2 * PAGE_BYTES)
        self.copies = module.CudaCopies(self.layers, self.pool, self.device)
        self.caches = caches

    def page(self, layer: int, page: int) -> torch.Tensor:
        return self.pool[layer, :, page]


@pytest.fixture(params=[1, 2, 100])
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """Return a GPU whose pinned buffers have this many blocks."""
    gpu = Gpu(monkeypatch, copies(monkeypatch), request.param)
    yield gpu
    gpu.copies.close()


def test_blocks_go_into_pages_and_from_there_into_other_blocks(gpu: Gpu) -> None:
    wanted = [layer.clone() for layer in gpu.layers]
    blocks, pages = [6, 0, 3], [9, 2, 4, 15, 0, 7]
    for layer in gpu.layers:
        layer[blocks] = 0xEE

    def compute() -> None:
        for layer, value in zip(gpu.layers, wanted, strict=True):
            layer[blocks] = value[blocks]

    gpu.device.computes(compute)
    errors: list[Exception | None] = []
    gpu.copies.save(blocks, pages, slice(None), errors.append).result(10)
    assert errors == [None]
    for number, layer in enumerate(wanted):
        assert gpu.page(number, 2).equal(in_pages(layer[6])[1])
        assert gpu.page(number, 0).equal(in_pages(layer[3])[0])
    assert not gpu.pool[:, :, [1, 3, 5]].any()

    others = [1, 7, 2]

    def earlier_step() -> None:
        for layer in gpu.layers:
            layer[others] = 0xEE

    gpu.device.computes(earlier_step)
    mark = gpu.copies.mark()
    gpu.copies.load(others, pages, mark)
    gpu.device.end()
    for layer, value in zip(gpu.layers, wanted, strict=True):
        assert layer[others].equal(value[blocks])
        assert layer[[4, 5]].equal(value[[4, 5]])
    for number, cache in enumerate(gpu.caches.values()):  # the layers are vLLM's own memory
        assert cache[7].contiguous().view(torch.uint8).equal(wanted[number][0])


def test_a_save_ends_after_its_last_event_and_is_waited_for(gpu: Gpu) -> None:
    gpu.device.gate.clear()
    ended = threading.Event()
    save = gpu.copies.save([1], [0, 1], slice(None), lambda error: ended.set())
    waiting = threading.Thread(target=gpu.copies.wait_for_saves)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert not ended.is_set()
    assert not save.done()
    assert not gpu.pool.any()
    gpu.device.gate.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert ended.is_set()
    assert gpu.pool[:, :, :2].any()


def test_a_failed_save_is_told(gpu: Gpu) -> None:
    errors: list[Exception | None] = []
    save = gpu.copies.save([BLOCKS], [0, 1], slice(None), errors.append)
    assert isinstance(save.exception(10), IndexError)
    assert errors == [save.exception()]


def test_copies_on_cpus_have_ended_when_the_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    module = copies(monkeypatch)
    vllm = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto"))
    caches = {name: one.contiguous() for name, one in flash_caches().items()}
    layers, _ = module.CpuCopies.layers_and_order(caches, vllm, config())
    wanted = [layer.clone() for layer in layers]
    pool = torch.zeros((LAYERS, 2, PAGES, HEADS, HEAD_BYTES), dtype=torch.uint8)
    on_cpu = module.copies_of("cpu")(layers, pool)
    errors: list[Exception | None] = []
    assert on_cpu.save([6, 3], [9, 2, 0, 7], slice(None), errors.append) is None
    assert errors == [None]
    assert pool[1, :, 2].equal(in_pages(wanted[1][6])[1])
    on_cpu.load([1, 5], [9, 2, 0, 7], on_cpu.mark())
    for layer, value in zip(layers, wanted, strict=True):
        assert layer[[1, 5]].equal(value[[6, 3]])


def test_orders_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = copies(monkeypatch)
    flash = flash_caches()
    heads_first = {name: one.contiguous() for name, one in flash.items()}
    vllm = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto"))
    orders = [
        module.CudaCopies.layers_and_order(flash, vllm, config())[1],
        module.CudaCopies.layers_and_order(heads_first, vllm, config())[1],
        module.CpuCopies.layers_and_order(heads_first, vllm, config())[1],
    ]
    assert orders == ["FLASH_ATTN", "FLASH_ATTN", "amx"]  # by head, both of flash are equal


def test_what_cannot_be_copied_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = copies(monkeypatch)
    of = module.CudaCopies.layers_and_order
    flash = flash_caches()
    unequal = {**flash, "layer 0": flash["layer 0"][:4]}
    packed = {"a": torch.zeros((BLOCKS, LAYERS, TOKENS, HEADS, VALUES))[:, 0].transpose(1, 2)}
    for caches, group, text in (
        (unequal, None, r"equal layers .* not \(8, 2, 32, 16\)"),
        (packed, None, "layouts LBNHC and LBHNC of vLLM, not .* strides"),
        (flash, SlidingWindowSpec(), "full attention on GPUs, not SlidingWindowSpec"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            of(caches, None, config(group))
    other = SimpleNamespace(get_name=lambda: "FLASHINFER")
    monkeypatch.setattr(module, "get_current_attn_backends", lambda config, names: [other])
    with pytest.raises(NotImplementedError, match="FLASH_ATTN on GPUs, not FLASHINFER"):
        of(flash, None, config())
    with pytest.raises(NotImplementedError, match="from cpu and cuda, not xpu"):
        module.copies_of("xpu")


class Connected:
    """A connector on a GPU, beside stand-ins for vLLM, and what it has reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        kv = connectors(monkeypatch)
        module = sys.modules["baton_copies"]
        (folder / "pool").touch()
        (folder / "generations").write_bytes(bytes(8 * PAGES))
        self.caches = flash_caches()
        layers, _ = module.CudaCopies.layers_and_order(self.caches, None, config())
        self.layers = layers
        self.device = Device(layers)
        monkeypatch.setattr(module, "_pinned", self.device.pinned)
        monkeypatch.setattr(module, "_BUFFER_BYTES", 2 * PAGE_BYTES)
        monkeypatch.setattr(module.CudaCopies.__init__, "__defaults__", (self.device,))
        self.connector = kv.BatonConnector(vllm_config("cuda", folder), None, config())
        self.connector._kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: ([4, 2, 7, 1],)
        )
        self.reported: list[tuple[int, int]] = []
        self.ended: list[tuple[int, int]] = []
        self.saves = SaveReports(
            str(folder / "saves"),
            lambda generation, saved, rank: self.reported.append((generation, saved.pages)),
            lambda *end: self.ended.append(end),
        )
        self.connector.register_kv_caches(self.caches)
        self.order = (folder / "order").read_text()

    def step(self, computed: int, scheduled: int, preempted: bool = False) -> None:
        output = engine_step("r", computed, scheduled)
        output.preempted_req_ids = {"r"} if preempted else set()
        self.connector.metadata = self.connector.build_connector_meta(output)
        self.connector.handle_preemptions(self.connector.metadata)
        self.connector.wait_for_save()

    async def until(self, *reported: tuple[int, int]) -> None:
        async with asyncio.timeout(10):
            while self.reported != [*reported]:
                await asyncio.sleep(0.01)

    def sent(self, *finished: str) -> set[str]:
        sent: set[str] = self.connector.get_transfer_results({*finished}).finished_sending
        return sent

    def close(self) -> None:
        self.device.gate.set()
        self.connector.shutdown()
        self.saves.close()


@pytest.fixture
async def connected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    connected = Connected(monkeypatch, tmp_path)
    yield connected
    connected.close()


def prompt(connected: Connected) -> Any:
    parameters = {"save_pages": [*range(6)], "first_token": 0, "generation": 7}
    request = SimpleNamespace(request_id="r", kv_transfer_params=parameters, num_prompt_tokens=100)
    connected.connector.update_state_after_alloc(request, None, 0)
    return request


async def test_blocks_of_a_finished_prompt_are_held_until_it_is_saved(connected: Connected) -> None:
    request = prompt(connected)
    connected.device.gate.clear()
    connected.step(0, 64)
    connected.step(64, 36)
    response = {"saving_pages": 6, "saved_tokens": 100}
    assert connected.connector.request_finished(request, []) == (True, response)
    assert connected.sent("r", "another") == set()
    await asyncio.sleep(0.05)
    assert connected.reported == []
    assert connected.sent() == set()
    connected.device.gate.set()
    await connected.until((7, 4), (7, 6))
    while not (sent := connected.sent()):
        await asyncio.sleep(0.01)
    assert sent == {"r"}
    assert connected.sent("r") == set()
    pool = torch.from_file(
        connected.connector._kv_transfer_config.kv_connector_extra_config["pool"],
        size=LAYERS * PAGES * PAGE_BYTES,
        dtype=torch.uint8,
    ).view(LAYERS, 2, PAGES, HEADS, HEAD_BYTES)
    for number, layer in enumerate(connected.layers):
        for at, block in enumerate([4, 2, 7]):
            pages = pool[number, :, 2 * at : 2 * at + 2].transpose(0, 1)
            assert pages.equal(in_pages(layer[block]))
    assert connected.order == "FLASH_ATTN"


async def test_blocks_of_a_cancelled_prompt_are_held_until_its_saves_end(
    connected: Connected,
) -> None:
    request = prompt(connected)
    connected.device.gate.clear()
    connected.step(0, 64)
    assert connected.connector.request_finished(request, []) == (True, {"saving_pages": 4})
    connected.step(64, 0)
    assert connected.sent("r") == set()
    await asyncio.sleep(0.05)
    assert connected.ended == []
    connected.device.gate.set()
    while not (sent := connected.sent()):
        await asyncio.sleep(0.01)
    assert sent == {"r"}
    connected.sent()
    await asyncio.sleep(0.05)
    assert {*connected.ended} == {(7, 0)}


async def test_a_step_after_a_preemption_waits_for_saves(connected: Connected) -> None:
    prompt(connected)
    connected.device.gate.clear()
    connected.step(0, 64)
    step = threading.Thread(target=connected.step, args=(0, 30, True))
    step.start()
    step.join(0.05)
    assert step.is_alive()
    connected.device.gate.set()
    step.join(10)
    assert not step.is_alive()
    await connected.until((7, 4))


async def test_a_failed_save_is_reported(connected: Connected) -> None:
    prompt(connected)
    manager = connected.connector._kv_cache_manager
    manager.get_block_ids = lambda name: ([BLOCKS, 1, 2],)
    connected.step(0, 64)
    await connected.until((7, -1))


async def test_pages_of_another_request_are_not_loaded(connected: Connected) -> None:
    connector = connected.connector
    parameters = {"load_pages": [3, 5], "first_token": 0, "generation": 9}
    request = SimpleNamespace(request_id="r", kv_transfer_params=parameters)
    blocks = SimpleNamespace(get_block_ids=lambda: ([6],))
    for generation, failed in ((9, set()), (8, {"r"})):
        connector._generations[[3, 5]] = generation
        request.kv_transfer_params = dict(parameters)
        connector.update_state_after_alloc(request, blocks, 32)
        connector.metadata = connector.build_connector_meta(engine_step("x", 0, 0))
        connector.start_load_kv(None)
        async with asyncio.timeout(10):
            while not (results := connector.get_transfer_results(set())).finished_recving:
                await asyncio.sleep(0.01)
        assert results.finished_recving == {"r"}
        assert results.failed_recving == failed


async def test_blocks_that_vllm_divides_are_refused(connected: Connected) -> None:
    connected.connector._block_tokens = 2 * TOKENS
    with pytest.raises(NotImplementedError, match=r"blocks of 64 tokens, .* `--block-size 32`"):
        connected.connector.register_kv_caches(connected.caches)
