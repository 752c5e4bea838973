"""The input of the cost model: a worker's last report, what was booked since, what it holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from batonpb.common_pb2 import Capabilities, WorkerStatus

from engine.core.geometry import BLOCK_TOKENS, head_bytes
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
from router.workers.table import Slot
from wire.compatibility import format_id


def loads_of(
    slots: Sequence[Slot],
    hashes: Sequence[bytes],
    prefix_index: PrefixIndex,
    book: LoadBook,
    now_ns: int,
    adapter: str = "",
    reports: "Reports | None" = None,
) -> list[WorkerLoad]:
    """The slots as the cost model takes them.

    Args:
        slots: Usable ones.
        hashes: Of the prompt's full blocks.
        prefix_index: Which worker holds which of them.
        book: Load that reports do not show yet.
        now_ns: Monotonic clock.
        adapter: Digest of the prompt's LoRA adapter, hexadecimal; empty for none.
        reports: Those that were read for an earlier prompt.
    """
    reports = reports or Reports()
    rates = Rates.expected([reports.of(slot) for slot in slots if slot.link is not None])
    return [
        load_of(
            slot,
            prefix_index.prefix_blocks(slot.link.incarnation, hashes, now_ns),
            book,
            adapter,
            rates,
            reports,
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
    def expected(cls, reports: Sequence["Report"]) -> "Rates":
        """The mean of its peers, so that nobody is preferred for not having measured."""
        prefills = [rate for report in reports if (rate := report.prefill_tokens_per_s)]
        steps = [step for report in reports if (step := report.decode_step_s)]
        return cls(
            fmean(prefills) if prefills else PRIOR_PREFILL_TOKENS_PER_S,
            fmean(steps) if steps else PRIOR_DECODE_STEP_S,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's last report, read once: many prompts are placed between two of them."""

    status: WorkerStatus
    capabilities: Capabilities
    queued_tokens: int
    streams: int
    room_blocks: int
    total_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    adapters: frozenset[bytes]
    edges: dict[str, Edge]
    block_bytes: int
    block_tokens: int
    format_id: str

    @classmethod
    def read(cls, status: WorkerStatus, capabilities: Capabilities) -> "Report":
        """As numbers."""
        groups, blocks = capabilities.kv_groups, status.kv_blocks
        return cls(
            status=status,
            capabilities=capabilities,
            queued_tokens=status.queued_prompt_tokens,
            streams=status.running + status.waiting,
            room_blocks=blocks.free + blocks.cached,
            total_blocks=blocks.total,
            prefill_tokens_per_s=status.prefill_tokens_per_s,
            decode_step_s=status.decode_step_s,
            adapters=frozenset(status.adapters),
            edges={
                edge.prefill_worker_id: Edge(
                    bytes_per_s=edge.bytes_per_s or PRIOR_EDGE_BYTES_PER_S,
                )
                for edge in status.edges
            },
            block_bytes=sum(
                len(group.layer_ids)
                * 2
                * group.num_kv_heads
                * head_bytes(group.dtype, group.head_dim)
                * group.block_tokens
                for group in groups
            ),
            block_tokens=groups[0].block_tokens if groups else BLOCK_TOKENS,
            format_id=format_id(capabilities),
        )


class Reports:
    """The last report of each worker, as numbers."""

    def __init__(self) -> None:
        self._read: dict[str, Report] = {}

    def of(self, slot: Slot) -> Report:
        """The worker's.

        Raises:
            ValueError: The worker is not connected.
        """
        link = slot.link
        if link is None or link.status is None:
            raise ValueError(f"{slot.worker_id} is not connected")
        report = self._read.get(slot.worker_id)
        if (
            report is None
            or report.status is not link.status
            or report.capabilities is not link.capabilities
        ):
            report = Report.read(link.status, link.capabilities)
            self._read[slot.worker_id] = report
        return report


def load_of(
    slot: Slot,
    cached_blocks: int,
    book: LoadBook,
    adapter: str = "",
    rates: Rates = Rates(),
    reports: Reports | None = None,
) -> WorkerLoad:
    """One worker's load: its last report, and what was booked since.

    Raises:
        ValueError: The worker is not connected.
    """
    link = slot.link
    if link is None:
        raise ValueError(f"{slot.worker_id} is not connected")
    report = (reports or Reports()).of(slot)
    tokens, streams = book.unreported(slot.worker_id)
    adapter_s = 0.0
    if adapter and bytes.fromhex(adapter) not in report.adapters:
        adapter_s = 0.0 if book.brings(slot.worker_id, adapter) else PRIOR_ADAPTER_LOAD_S
    return WorkerLoad(
        worker_id=slot.worker_id,
        incarnation=link.incarnation,
        role=slot.role,
        queued_tokens=report.queued_tokens + tokens,
        streams=report.streams + streams,
        room_blocks=report.room_blocks,
        total_blocks=report.total_blocks,
        cached_blocks=cached_blocks,
        adapter_s=adapter_s,
        prefill_tokens_per_s=report.prefill_tokens_per_s or rates.prefill_tokens_per_s,
        decode_step_s=report.decode_step_s or rates.decode_step_s,
        block_bytes=report.block_bytes,
        block_tokens=report.block_tokens,
        format_id=report.format_id,
        edges=report.edges,
    )
