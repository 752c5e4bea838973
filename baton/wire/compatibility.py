"""Properties that two processes must share before they exchange requests or KV."""

from batonpb import common_pb2 as pb

from baton.engine.emulated_timing import timing_in
from baton.engine.settings import EXTERNAL_KINDS
from baton.types.geometry import SCALED, KvGeometry

WIRE_MIN = 2
WIRE_MAX = 3
GATHERED_WIRE = 3
"""First wire version whose workers read several router frames that travel as one."""

_SUMS = {"tile", "vdp"}  # parts of a numerics id, see ``baton.engine.cpu.native.library``


def kv_group(geometry: KvGeometry) -> pb.KvGroup:
    """Return the single KV group of a model whose layers are all alike."""
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
    """Return the pool geometry of a worker with this KV group: the inverse of ``kv_group``."""
    return KvGeometry(
        num_layers=len(group.layer_ids),
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        num_blocks=num_blocks,
        dtype=group.dtype,
        block_tokens=group.block_tokens,
    )


def kv_format(capabilities: pb.Capabilities) -> str:
    """Return shape and dtype of a block, such as ``bf16/30x3x64/16``; part of every block hash."""
    return ";".join(
        f"{group.dtype}/{len(group.layer_ids)}x{group.num_kv_heads}x{group.head_dim}"
        f"/{group.block_tokens}"
        for group in capabilities.kv_groups
    )


def format_id(capabilities: pb.Capabilities) -> str:
    """Return an id that is equal for two workers between which KV can move."""
    digest = capabilities.weights_digest.hex()
    own = f"|{capabilities.hand_off}" if capabilities.hand_off else ""
    return f"{kv_format(capabilities)}|{capabilities.numerics_id}|{digest}{own}"


def _format_name(capabilities: pb.Capabilities) -> str:
    parts = ["+".join(group.components) for group in capabilities.kv_groups]
    return f"{kv_format(capabilities)} ({'; '.join(parts)})"


def emulation(capabilities: pb.Capabilities) -> str:
    """Return the timing model of an emulated worker; "" for a real one."""
    return timing_in(capabilities.numerics_id)


def external_engine(capabilities: pb.Capabilities) -> str:
    """Return name and version of an external engine, such as ``vllm 0.32.0``; "" for others."""
    name, _, rest = capabilities.numerics_id.partition("/")
    return f"{name} {rest.partition('/')[0]}" if name in EXTERNAL_KINDS else ""


def own_wire() -> pb.WireRange:
    """Return the wire versions of this process."""
    return pb.WireRange(min=WIRE_MIN, max=WIRE_MAX)


def wire_overlaps(theirs: pb.WireRange) -> bool:
    """Return whether a peer shares a wire version with this process; old peers leave ``max`` 0."""
    return theirs.min <= WIRE_MAX and max(theirs.max, theirs.min) >= WIRE_MIN


def _numerics_hint(ours: str, theirs: str) -> str:
    sums = [_SUMS & set(numerics_id.split("/")) for numerics_id in (ours, theirs)]
    if not all(sums) or sums[0] == sums[1]:
        return ""
    return "; their CPUs sum in different orders: set `numerics: {native: tile}` for all workers"


def disagreement(ours: pb.Capabilities, theirs: pb.Capabilities) -> str:
    """Return why two workers are incompatible, naming the field that differs; "" if they are not.

    Code versions are not compared, so that a rolling upgrade works.
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
            f"{_numerics_hint(ours.numerics_id, theirs.numerics_id)}"
        )
    if ours.weights_digest != theirs.weights_digest:
        return "the weights differ"
    if ours.hand_off != theirs.hand_off:
        ways = [side.hand_off or "Baton's" for side in (ours, theirs)]
        return f"the hand-offs of KV differ: {ways[0]} here and {ways[1]} there"
    return ""
