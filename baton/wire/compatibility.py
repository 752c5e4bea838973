"""What two processes must agree on before they work together, and KV may pass between them."""

from batonpb import common_pb2 as pb

from baton.engine.emulated_timing import timing_in
from baton.types.geometry import SCALED, KvGeometry

WIRE_MIN = 1
WIRE_MAX = 3
EMITTED_WIRE = 2
"""The first version whose workers go on with an answer that began elsewhere."""
GATHERED_WIRE = 3
"""The first version whose workers read several frames of a router that travel as one."""

_SUMS = {"tile", "vdp"}  # of a numerics id: ``baton.engine.cpu.native.library``


def kv_group(geometry: KvGeometry) -> pb.KvGroup:
    """The single kv group of a model whose layers are all alike."""
    return pb.KvGroup(
        id=0,
        layer_ids=range(geometry.num_layers),
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_tokens=geometry.block_tokens,
        dtype=geometry.dtype,
        components=["k", "v", "k_scale", "v_scale"] if geometry.dtype in SCALED else ["k", "v"],
    )


def geometry_of(group: pb.KvGroup, num_blocks: int) -> KvGeometry:
    """The pool of a worker with that kv group: ``kv_group`` backwards."""
    return KvGeometry(
        num_layers=len(group.layer_ids),
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        num_blocks=num_blocks,
        dtype=group.dtype,
        block_tokens=group.block_tokens,
    )


def kv_format(capabilities: pb.Capabilities) -> str:
    """Shape and dtype of a block, such as ``bf16/30x3x64/16``; part of every block's name."""
    return ";".join(
        f"{group.dtype}/{len(group.layer_ids)}x{group.num_kv_heads}x{group.head_dim}"
        f"/{group.block_tokens}"
        for group in capabilities.kv_groups
    )


def format_id(capabilities: pb.Capabilities) -> str:
    """Equal for two workers that can hand KV to each other."""
    digest = capabilities.weights_digest.hex()
    return f"{kv_format(capabilities)}|{capabilities.numerics_id}|{digest}"


def _format_name(capabilities: pb.Capabilities) -> str:
    parts = ["+".join(group.components) for group in capabilities.kv_groups]
    return f"{kv_format(capabilities)} ({'; '.join(parts)})"


def emulation(capabilities: pb.Capabilities) -> str:
    """The timing model of an emulated worker; "" for a real one."""
    return timing_in(capabilities.numerics_id)


def own_wire() -> pb.WireRange:
    """The versions of the wire that this process speaks."""
    return pb.WireRange(min=WIRE_MIN, max=WIRE_MAX)


def wire_overlaps(theirs: pb.WireRange) -> bool:
    """Whether a peer speaks a version that this process speaks; an old peer may leave ``max`` 0."""
    return theirs.min <= WIRE_MAX and max(theirs.max, theirs.min) >= WIRE_MIN


def _what_to_set(ours: str, theirs: str) -> str:
    """How to make two workers sum alike, if that is all that they would need."""
    sums = [_SUMS & set(numerics_id.split("/")) for numerics_id in (ours, theirs)]
    if not all(sums) or sums[0] == sums[1]:
        return ""
    return "; their CPUs sum differently by default: set `numerics: {native: tile}` for all"


def disagreement(ours: pb.Capabilities, theirs: pb.Capabilities) -> str:
    """Why the pair cannot work, naming the field that differs; "" if it can.

    The code version is not compared, so that a rolling upgrade works.
    """
    if ours.wire.max < theirs.wire.min or theirs.wire.max < ours.wire.min:
        return (
            f"wire versions {ours.wire.min}-{ours.wire.max} and "
            f"{theirs.wire.min}-{theirs.wire.max} do not overlap"
        )
    if emulation(ours) != emulation(theirs):
        kinds = [
            f"emulated ({emulation(side)})" if emulation(side) else "real"
            for side in (ours, theirs)
        ]
        return f"the engines differ: {kinds[0]} here and {kinds[1]} there"
    if list(ours.kv_groups) != list(theirs.kv_groups):
        names = [_format_name(side) for side in (ours, theirs)]
        return f"the KV formats differ: {names[0]} here and {names[1]} there"
    if ours.numerics_id != theirs.numerics_id:
        return (
            f"numerics differ: {ours.numerics_id!r} and {theirs.numerics_id!r}"
            f"{_what_to_set(ours.numerics_id, theirs.numerics_id)}"
        )
    if ours.weights_digest != theirs.weights_digest:
        return "the weights differ"
    return ""
