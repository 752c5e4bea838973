"""Workers between which KV can move, and those that refuse each other."""

import pytest
from batonpb.common_pb2 import Capabilities

from baton.types.geometry import KvGeometry
from baton.wire.compatibility import disagreement, format_id, kv_group, own_wire

GEOMETRY = KvGeometry(num_layers=4, num_kv_heads=2, head_dim=8, num_blocks=64, dtype="bf16")
VLLM = "vllm/0.32.0/bf16/bf16/cpu-auto"


def worker(
    numerics_id: str = VLLM, digest: bytes = b"weights", hand_off: str = "nixl/block32"
) -> Capabilities:
    return Capabilities(
        wire=own_wire(),
        kv_groups=[kv_group(GEOMETRY)],
        numerics_id=numerics_id,
        weights_digest=digest,
        hand_off=hand_off,
    )


def test_equal_vllm_workers_pair() -> None:
    assert disagreement(worker(), worker()) == ""
    assert format_id(worker()) == format_id(worker())


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (worker(VLLM.replace("0.32.0", "0.33.0")), "numerics differ"),
        (worker(VLLM.replace("auto", "FLASH_ATTN")), "numerics differ"),
        (worker(digest=b"others"), "the weights differ"),
        (worker(hand_off="nixl/block32/tp2"), "nixl/block32 here and nixl/block32/tp2 there"),
        (worker(hand_off="nixl/block16"), "nixl/block32 here and nixl/block16 there"),
        (worker(hand_off=""), "nixl/block32 here and Baton's there"),
        (worker("fast/cpu-bf16", hand_off=""), "numerics differ"),
    ],
)
def test_other_workers_do_not_pair_with_a_vllm_worker(other: Capabilities, reason: str) -> None:
    assert reason in disagreement(worker(), other)
    assert disagreement(other, worker()) != ""
    assert format_id(worker()) != format_id(other)  # by which routers choose pairs


def test_the_id_of_workers_with_batons_own_hand_off_is_that_of_earlier_versions() -> None:
    """It seeds the hashes of cached blocks."""
    own = worker("exact/cpu", hand_off="")
    assert format_id(own) == "bf16/4x2x8/16|exact/cpu|77656967687473"
