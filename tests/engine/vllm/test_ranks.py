"""Copies of the ranks of vLLM's tensor parallelism, each of which has a part of the KV heads."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.remote.live_request import Saved
from baton.engine.vllm.hand_off_baton import SaveReports
from tests.engine.vllm.test_inside import connectors, note, vllm_config

RANKS, LAYERS, BLOCKS, HEADS, TOKENS, VALUES = 2, 3, 8, 4, 32, 16
PAGES = BLOCKS * TOKENS // 16
HEAD_BYTES = 16 * VALUES  # of half a page, in bf16
BLOCK_BYTES = 2 * HEAD_BYTES * HEADS // RANKS * 2  # of a layer and a rank


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return connectors(monkeypatch)


def heads_of(rank: int, ranks: int) -> slice:
    """Return the KV heads of a rank, as vLLM divides them."""
    first = rank * HEADS // ranks
    return slice(first, first + max(HEADS // ranks, 1))


class Vllm:
    """The connectors of the ranks of one vLLM, with their blocks and the pool that they map."""

    def __init__(self, module: Any, folder: Path, ranks: int = RANKS) -> None:
        folder.mkdir()
        (folder / "pool").touch()
        (folder / "generations").write_bytes(bytes(8 * PAGES))
        self.reported: list[tuple[int, int, int]] = []
        self.saves = SaveReports(str(folder / "saves"), note(self.reported), lambda *_: None)
        self.module = module
        self.connectors: list[Any] = []
        self.caches: list[torch.Tensor] = []
        kv = torch.randn((LAYERS, BLOCKS, HEADS, TOKENS, VALUES)).bfloat16()
        for rank in range(ranks):
            config = vllm_config("cpu", folder, rank, ranks, HEADS)
            one = module.BatonConnector(config, None, None)
            caches = kv[:, :, heads_of(rank, ranks)].clone()
            one.register_kv_caches({f"layer {n}": cache for n, cache in enumerate(caches)})
            self.connectors.append(one)
            self.caches.append(caches)
        size = (folder / "pool").stat().st_size
        assert size == LAYERS * 2 * PAGES * HEADS * HEAD_BYTES
        mapped = torch.from_file(str(folder / "pool"), True, size, dtype=torch.uint8)
        self.pool = mapped.view(LAYERS, 2, PAGES, HEADS, HEAD_BYTES)

    def all_heads(self) -> torch.Tensor:
        """Return the KV of all ranks, each head once."""
        every = len(self.caches) // HEADS or 1
        return torch.cat(self.caches[::every], 2)

    def compute(self, rank: int, blocks: list[int], pages: list[int], names: list[str]) -> None:
        """Compute layers of a step that fills blocks."""
        copy = self.module.Copy("r", blocks, pages, generation=7, end=len(pages))
        self.connectors[rank].metadata = self.module.Step(saves=[copy])
        for name in names:
            self.connectors[rank].save_kv_layer(name, None, None)

    def save(self, rank: int, blocks: list[int], pages: list[int]) -> None:
        copy = self.module.Copy("r", blocks, pages, generation=7, end=len(pages))
        self.connectors[rank].metadata = self.module.Step(saves=[copy])
        self.connectors[rank].wait_for_save()

    async def load(self, rank: int, blocks: list[int], pages: list[int]) -> bool:
        """Return whether the load succeeded."""
        connector = self.connectors[rank]
        copy = self.module.Copy("r", blocks, pages, generation=9)
        connector.metadata = self.module.Step(loads=[copy])
        connector.start_load_kv(None)
        async with asyncio.timeout(10):
            while not (results := connector.get_transfer_results(set())).finished_recving:
                await asyncio.sleep(0.01)
        return not results.failed_recving

    def close(self) -> None:
        for one in self.connectors:
            one.shutdown()
        self.saves.close()


async def test_ranks_save_into_one_pool_and_those_of_another_worker_load_from_it(
    module: Any, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    prefill, decode = (Vllm(module, tmp_path / name) for name in ("prefill", "decode"))
    blocks, pages = [6, 0, 3], [9, 2, 4, 15, 0, 7]
    others, other_pages = [1, 7, 2], [3, 1, 8, 10, 12, 5]
    before = [one.clone() for one in decode.caches]

    prefill.save(1, blocks, pages)
    assert not prefill.pool[:, :, :, :2].any()
    own = prefill.caches[1].view(torch.uint8).view(LAYERS, BLOCKS, 2, 2, 2, HEAD_BYTES)
    for layer in range(LAYERS):
        # a block has two pages
        assert prefill.pool[layer, :, 2, 2:].equal(own[layer, 6, :, 1].transpose(0, 1))
        assert prefill.pool[layer, :, 0, 2:].equal(own[layer, 3, :, 0].transpose(0, 1))
    prefill.save(0, blocks, pages)
    await asyncio.sleep(0.05)
    assert prefill.reported == [(7, 6, 1), (7, 6, 0)]

    decode.pool[:, :, other_pages] = prefill.pool[:, :, pages]  # as the transports do
    decode.connectors[0]._generations[other_pages] = 9  # one file for all ranks
    for rank in range(RANKS):
        assert await decode.load(rank, others, other_pages)
        assert decode.caches[rank][:, others].equal(prefill.caches[rank][:, blocks])
        assert decode.caches[rank][:, [0, 3, 4, 5, 6]].equal(before[rank][:, [0, 3, 4, 5, 6]])
    prefill.close()
    decode.close()


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 4), (4, 1), (2, 8), (8, 1)])
async def test_pages_do_not_depend_on_the_number_of_ranks(
    module: Any, tmp_path: Path, senders: int, receivers: int
) -> None:
    """Eight ranks have each of the four heads twice."""
    torch.manual_seed(3)
    prefill = Vllm(module, tmp_path / "prefill", senders)
    decode = Vllm(module, tmp_path / "decode", receivers)
    for rank in range(senders):
        prefill.save(rank, [6, 0], [9, 2, 4, 15])
    decode.pool[:] = prefill.pool
    decode.connectors[0]._generations[[9, 2, 4, 15]] = 9
    sent = prefill.all_heads()[:, [6, 0]]
    assert not decode.all_heads()[:, [1, 7]].equal(sent)
    for rank in range(receivers):
        assert await decode.load(rank, [1, 7], [9, 2, 4, 15])
    assert decode.all_heads()[:, [1, 7]].equal(sent)
    prefill.close()
    decode.close()


@pytest.mark.parametrize("other", [{"world_size": 4}, {"decode_context_parallel_size": 2}])
def test_other_parallel_sizes_are_refused(
    module: Any, tmp_path: Path, other: dict[str, int]
) -> None:
    with pytest.raises(NotImplementedError, match="of no other parallel sizes"):
        module.BatonConnector(vllm_config("cpu", tmp_path, ranks=2, **other), None, None)


async def test_layers_are_saved_in_groups_as_soon_as_they_are_computed(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = Vllm(module, tmp_path / "vllm")
    saved: list[Saved] = []
    vllm.saves._on_saved = lambda generation, one, rank: saved.append(one)
    monkeypatch.setattr(module, "_GROUP_BYTES", 2 * BLOCK_BYTES)  # two layers of one block
    vllm.compute(0, [6], [9, 2], ["layer 0"])
    assert not vllm.pool.any()
    vllm.connectors[0].save_kv_layer("layer 1", None, None)
    assert vllm.pool[0, :, [9, 2]].any()
    assert vllm.pool[1, :, [9, 2]].any()
    assert not vllm.pool[2].any()
    vllm.caches[0][:2, 6] = 0.0  # they are not read again
    before = vllm.pool[:2].clone()
    vllm.connectors[0].save_kv_layer("layer 2", None, None)
    assert not vllm.pool[2].any()
    vllm.connectors[0].wait_for_save()
    assert vllm.pool[:2].equal(before)
    assert vllm.pool[2, :, [9, 2]].any()
    await asyncio.sleep(0.05)
    assert saved == [Saved(0, 2, 2, LAYERS), Saved(2)]
    vllm.close()


async def test_layers_out_of_order_are_saved_when_the_step_ends(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = Vllm(module, tmp_path / "vllm")
    monkeypatch.setattr(module, "_GROUP_BYTES", 1)
    vllm.compute(0, [6], [9, 2], ["layer 1", "layer 2", "a layer of a draft"])
    assert not vllm.pool.any()
    vllm.connectors[0].wait_for_save()
    assert all(vllm.pool[layer, :, [9, 2]].any() for layer in range(LAYERS))
    await asyncio.sleep(0.05)
    assert vllm.reported == [(7, 2, 0)]
    vllm.compute(0, [3], [4, 5], ["layer 0"])  # the next step begins anew
    assert vllm.pool[0, :, [4, 5]].any()
    vllm.close()
