"""The digest of the emulated engine: each byte counts, and the place of a block does not."""

import numpy as np
import pytest

from baton.engine.emulated import EmulatedRunner
from baton.types.geometry import KvGeometry

BLOCKS = 40
TOKENS = 16 * 12 + 5
LAYOUTS = {
    "in one run": range(3, 16),
    "in runs": (30, 31, 32, 4, 5, 20, 21, 22, 23, 24, 25, 0, 39),
    "scattered": range(38, 12, -2),
}


def runner_of(block_ids, kv: np.ndarray) -> EmulatedRunner:
    """A runner whose pool holds the blocks of a sequence at these places, and noise elsewhere."""
    geometry = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=8, num_blocks=BLOCKS, dtype="bf16")
    noise = np.random.default_rng(len(set(block_ids)) + block_ids[0]).bytes(geometry.pool_bytes)
    runner = EmulatedRunner(geometry, bytearray(noise))
    for place, block_id in enumerate(block_ids):
        runner._pool[:, :, block_id] = kv[:, :, place]
    return runner


@pytest.fixture
def kv() -> np.ndarray:
    shape = (2, 2, 13, 16, 16)  # layers, K and V, blocks, tokens, bytes
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, TOKENS, 16 * 13])
def test_the_digest_does_not_depend_on_where_blocks_lie(kv, layout, tokens):
    golden = list(range(13))
    expected = runner_of(golden, kv).digest(golden, tokens)
    block_ids = list(LAYOUTS[layout])
    assert runner_of(block_ids, kv).digest(block_ids, tokens) == expected


@pytest.mark.parametrize("position", [0, 15, 16, 100, TOKENS - 1])
def test_each_byte_of_each_layer_counts(kv, position):
    block_ids = list(LAYOUTS["in runs"])
    runner = runner_of(block_ids, kv)
    before = runner.digest(block_ids, TOKENS)
    block, slot = divmod(position, 16)
    for layer in range(2):
        for component in range(2):
            runner._pool[layer, component, block_ids[block], slot, 7] ^= 1
            assert runner.digest(block_ids, TOKENS) != before
            runner._pool[layer, component, block_ids[block], slot, 7] ^= 1
    assert runner.digest(block_ids, TOKENS) == before


def test_what_lies_behind_the_sequence_does_not_count(kv):
    block_ids = list(LAYOUTS["in runs"])
    runner = runner_of(block_ids, kv)
    before = runner.digest(block_ids, TOKENS)
    block, slot = divmod(TOKENS, 16)
    runner._pool[:, :, block_ids[block], slot] ^= 1
    assert runner.digest(block_ids, TOKENS) == before
