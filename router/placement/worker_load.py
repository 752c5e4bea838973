"""The input of the cost model: a worker's last report, what was booked since, what it holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from engine.core.geometry import head_bytes
from router.placement.booked_load import LoadBook
from router.placement.cost import (
    PRIOR_ADAPTER_LOAD_S,
    PRIOR_DECODE_STEP_S,
    PRIOR_EDGE_BYTES_PER_S,
    PRIOR_PREFILL_TOKENS_PER_S,
    Edge,
    WorkerLoad,
)
from router.placement.prefix_index import PrefixIndex
from router.placement.regret import FittedRates
from router.workers.table import Slot
from wire.compatibility import format_id


def loads_of(
    slots: Sequence[Slot],
    hashes: Sequence[bytes],
    prefix_index: PrefixIndex,
    book: LoadBook,
    now_ns: int,
    adapter: str = "",
) -> list[WorkerLoad]:
    """The slots as the cost model takes them.

    Args:
        slots: Usable ones.
        hashes: Of the prompt's full blocks.
        prefix_index: Which worker holds which of them.
        book: Load that reports do not show yet.
        now_ns: Monotonic clock.
        adapter: Digest of the prompt's LoRA adapter, hexadecimal; empty for none.
    """
    rates = Rates.expected(slots)
    return [
        load_of(
            slot,
            prefix_index.prefix_blocks(slot.link.incarnation, hashes, now_ns),
            book,
            adapter,
            rates,
        )
        for slot in slots
        if slot.link is not None
    ]


@dataclass(frozen=True, slots=True)
class Rates:
    """What is expected of a worker that has not measured itself yet."""

    prefill_tokens_per_s: float = PRIOR_PREFILL_TOKENS_PER_S
    decode_step_s: float = PRIOR_DECODE_STEP_S

    @classmethod
    def expected(cls, slots: Sequence[Slot]) -> "Rates":
        """The mean of its peers, so that nobody is preferred for not having measured."""
        reports = [slot.link.status for slot in slots if slot.link and slot.link.status]
        prefills = [report.prefill_tokens_per_s for report in reports]
        steps = [report.decode_step_s for report in reports]
        return cls(
            mean(filter(None, prefills)) if any(prefills) else PRIOR_PREFILL_TOKENS_PER_S,
            mean(filter(None, steps)) if any(steps) else PRIOR_DECODE_STEP_S,
        )


def load_of(
    slot: Slot,
    cached_blocks: int,
    book: LoadBook,
    adapter: str = "",
    rates: Rates = Rates(),
) -> WorkerLoad:
    """One worker's load: its last report, and what was booked since."""
    link = slot.link
    if link is None or link.status is None:
        raise ValueError(f"{slot.worker_id} is not connected")
    status, groups = link.status, link.capabilities.kv_groups
    tokens, streams = book.unreported(slot.worker_id)
    has_adapter = bytes.fromhex(adapter) in status.adapters or book.brings(slot.worker_id, adapter)
    return WorkerLoad(
        worker_id=slot.worker_id,
        incarnation=link.incarnation,
        role=slot.role,
        queued_tokens=status.queued_prompt_tokens + tokens,
        streams=status.running + status.waiting + streams,
        room_blocks=status.kv_blocks.free + status.kv_blocks.cached,
        total_blocks=status.kv_blocks.total,
        cached_blocks=cached_blocks,
        adapter_s=PRIOR_ADAPTER_LOAD_S if adapter and not has_adapter else 0.0,
        prefill_tokens_per_s=status.prefill_tokens_per_s or rates.prefill_tokens_per_s,
        decode_step_s=status.decode_step_s or rates.decode_step_s,
        block_bytes=sum(
            len(group.layer_ids)
            * 2
            * group.num_kv_heads
            * head_bytes(group.dtype, group.head_dim)
            * group.block_tokens
            for group in groups
        ),
        format_id=format_id(link.capabilities),
        edges={
            edge.prefill_worker_id: Edge(
                bytes_per_s=edge.bytes_per_s or PRIOR_EDGE_BYTES_PER_S,
            )
            for edge in status.edges
        },
    )


def fitted_rates(slots: Iterable[Slot]) -> dict[str, FittedRates]:
    """What live workers report of themselves now, by worker."""
    return {
        slot.worker_id: FittedRates(status.prefill_tokens_per_s, status.decode_step_s)
        for slot in slots
        if slot.link is not None and (status := slot.link.status) is not None
    }
