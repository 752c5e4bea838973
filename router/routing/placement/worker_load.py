"""Input of the cost model: a worker's last report, load booked since, and cached blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from batonpb.common_pb2 import Capabilities, WorkerStatus

from baton.types.geometry import BLOCK_TOKENS, context_tokens, head_bytes
from baton.types.step_lines import DecodeLine
from baton.wire.compatibility import external_engine, format_id
from router.routing.placement.block_table import Hashes
from router.routing.placement.booked_load import LoadBook, Unreported
from router.routing.placement.congestion import Crowding
from router.routing.placement.cost import (
    BRING_OVERHEAD_S,
    PRIOR_ADAPTER_LOAD_S,
    PRIOR_DECODE_STEP_S,
    PRIOR_EDGE_BYTES_PER_S,
    PRIOR_PREFILL_TOKENS_PER_S,
    PRIOR_TIER_BLOCK_S,
    WorkerLoad,
)
from router.routing.placement.edges import Links, ReportedEdges
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.prefix_sources import Source
from router.routing.workers.slot import WorkerSlot

NO_TIERS = (0, 0.0)
_SAMPLE_PROMPT_TOKENS = 4096
_RATES_VALID_NS = 1_000_000_000
_SMALL_FLEET = 32  # workers
_NEGLIGIBLE = 0.002
_FIT_SPREAD = 0.1  # the fits of equal workers differ by a few percent


def loads_of(
    slots: Sequence[WorkerSlot],
    hashes: Hashes,
    prefix_index: PrefixIndex,
    book: LoadBook,
    now_ns: int,
    reports: "Reports | None" = None,
) -> list[WorkerLoad]:
    """Return the input of the cost model for each usable slot, from reports and bookings."""
    reports = reports or Reports()
    connected = [
        ReportedWorker(slot, slot.incarnation, reports.of(slot))
        for slot in slots
        if slot.link is not None
    ]
    reader = LoadReader(book, reports.expected(connected, now_ns), reports)
    held = prefix_index.prefixes(hashes, now_ns) if hashes else {}
    return [reader.of(worker.slot, held.get(worker.incarnation, 0)) for worker in connected]


class FittedPromptLine(NamedTuple):
    """Time per prompt token, plus ``context_s`` per token before it; 0 if not measured."""

    token_s: float = 0.0
    context_s: float = 0.0
    sample_s: float = 0.0  # time of a prompt of usual length, for comparisons

    @classmethod
    def fitted(cls, token_s: float, context_s: float) -> "FittedPromptLine":
        """Return the line that a worker reports."""
        context = context_tokens(0, _SAMPLE_PROMPT_TOKENS)
        sample_s = _SAMPLE_PROMPT_TOKENS * token_s + context * context_s
        return cls(token_s, context_s, sample_s)

    def is_like(self, usual: "FittedPromptLine") -> bool:
        """Return whether two workers differ by less than fits of equal workers do."""
        return abs(self.sample_s - usual.sample_s) <= _FIT_SPREAD * usual.sample_s


@dataclass(frozen=True, slots=True)
class Rates:
    """Expected rates of workers that have not measured."""

    prefill_tokens_per_s: float = PRIOR_PREFILL_TOKENS_PER_S
    decode_step_s: float = PRIOR_DECODE_STEP_S
    edge_bytes_per_s: float = PRIOR_EDGE_BYTES_PER_S
    prompt_lines: Mapping[str, FittedPromptLine] = field(default_factory=dict)  # by role

    @classmethod
    def expected(cls, reports: Sequence[tuple[str, "ParsedReport"]]) -> "Rates":
        """Return the means of other workers, so that missing measurements are no advantage.

        The same holds for edges: with fast links, a pair without a transfer must not count as slow,
        or it will never get one.
        """
        prefills = [rate for _, report in reports if (rate := report.prefill_tokens_per_s)]
        steps = [step for _, report in reports if (step := report.decode_step_s)]
        edges = [rate for _, report in reports if (rate := report.edge_bytes_per_s)]
        lines: dict[str, list[FittedPromptLine]] = {}
        for role, report in reports:
            if report.prompt_line.token_s:
                lines.setdefault(role, []).append(report.prompt_line)
        return cls(
            fmean(prefills) if prefills else PRIOR_PREFILL_TOKENS_PER_S,
            fmean(steps) if steps else PRIOR_DECODE_STEP_S,
            fmean(edges) if edges else PRIOR_EDGE_BYTES_PER_S,
            {role: _median(of_role) for role, of_role in lines.items()},
        )

    def is_like(self, other: "Rates") -> bool:
        """Return whether the difference is negligible."""
        if self.prompt_lines.keys() != other.prompt_lines.keys():
            return False
        own, others = self._figures(), other._figures()  # noqa: SLF001 - of the same class
        pairs = zip(own, others, strict=True)
        return all(abs(a - b) <= _NEGLIGIBLE * abs(b) for a, b in pairs)

    def _figures(self) -> list[float]:
        lines = [figure for role in sorted(self.prompt_lines) for figure in self.prompt_lines[role]]
        return [self.prefill_tokens_per_s, self.decode_step_s, self.edge_bytes_per_s, *lines]

    def prompt_line(self, role: str, report: "ParsedReport") -> FittedPromptLine:
        """Return the worker's own line, or the usual one if the difference is noise.

        Half a percent would send every uncached prompt to the same few idle workers: the rate would
        break every tie the same way, and the cache would follow. A worker that has computed only
        short prompts reports no line.
        """
        own = report.prompt_line
        usual = self.prompt_lines.get(role)
        if usual is not None and (not own.token_s or own.is_like(usual)):
            return usual
        return own

    def token_s(self, role: str, report: "ParsedReport") -> float:
        """Return the time of a prompt token without context."""
        known_s = self.prompt_line(role, report).token_s
        return known_s or 1 / (report.prefill_tokens_per_s or self.prefill_tokens_per_s)


def _median(lines: Sequence[FittedPromptLine]) -> FittedPromptLine:
    return sorted(lines, key=attrgetter("sample_s"))[len(lines) // 2]


class ParsedReport:
    """A worker's last report, parsed once: many prompts are placed between two reports.

    Unchanged capabilities are taken from the report ``before``.
    """

    def __init__(
        self,
        status: WorkerStatus,
        capabilities: Capabilities,
        links: Links | None = None,
        before: "ParsedReport | None" = None,
    ) -> None:
        blocks = status.kv_blocks
        self.status = status
        self.capabilities = capabilities
        self.queued_tokens = status.queued_prompt_tokens
        self.queued_context = status.queued_prompt_context
        self.streams = status.running + status.waiting
        self.answering = status.answering if status.HasField("answering") else None
        self.room_blocks = blocks.free + blocks.cached
        self.total_blocks = blocks.total
        self.prefill_tokens_per_s = status.prefill_tokens_per_s
        self.prompt_line = FittedPromptLine.fitted(status.prefill_token_s, status.prefill_context_s)
        self.decode_step_s = status.decode_step_s
        self.decode_line = DecodeLine(
            status.decode_base_s, status.decode_row_s, status.decode_context_s
        )
        self.answering_context = status.answering_context
        self.coming_context = status.coming_context
        self.adapters = frozenset(status.adapters)
        self.edges_bytes_per_s = ReportedEdges(status, links)
        # The mean of a sample; 0: none was measured.
        self.edge_bytes_per_s = self.edges_bytes_per_s.usual_bytes_per_s()
        if before is not None and before.capabilities is capabilities:
            self.shape: tuple[int, int, str, bool] = before.shape
        else:
            self.shape = _shape(capabilities)
        self.block_bytes, self.block_tokens, self.format_id, self.evicts_of_queue = self.shape
        self.tier_block_s = {  # by tier, the fastest first
            tier.name: tier.block_s or PRIOR_TIER_BLOCK_S.get(tier.name, 0.0)
            for tier in status.kv_tiers
        }

    def tiers(self, cached_blocks: int, held: Mapping[str, int]) -> tuple[int, float]:
        """Return the blocks of a prompt in pool and tiers, and the time to bring them back.

        ``held`` has the number of blocks in each tier or one above it.
        """
        blocks = cached_blocks
        seconds = BRING_OVERHEAD_S
        for tier, block_s in self.tier_block_s.items():
            if (more := held.get(tier, 0) - blocks) > 0:
                blocks = blocks + more
                seconds = seconds + more * block_s
        return (blocks, seconds) if blocks > cached_blocks else NO_TIERS


def _shape(capabilities: Capabilities) -> tuple[int, int, str, bool]:
    """Return size and tokens of a block, its format, and if prompts in the queue evict others."""
    groups = capabilities.kv_groups
    block_bytes = sum(
        len(group.layer_ids)
        * 2
        * group.num_kv_heads
        * head_bytes(group.dtype, group.head_dim)
        * group.block_tokens
        for group in groups
    )
    tokens = groups[0].block_tokens if groups else BLOCK_TOKENS
    return block_bytes, tokens, format_id(capabilities), bool(external_engine(capabilities))


class ReportedWorker(NamedTuple):
    """A worker and its last report."""

    slot: WorkerSlot
    incarnation: bytes
    report: ParsedReport


class Reports:
    """Last report of each worker, parsed."""

    def __init__(self) -> None:
        self._read: dict[str, ParsedReport] = {}
        self._rates = Rates()
        self._links = Links()
        self._rates_until_ns = -1

    def expected(
        self, connected: Sequence[ReportedWorker], now_ns: int, *, changed: bool = False
    ) -> "Rates":
        """Return the expected rates of workers that have not measured.

        They are computed once a second, and in a small fleet whenever a report has ``changed``:
        there an outdated mean would make workers without measurement look faster or slower.
        """
        if now_ns >= self._rates_until_ns or (changed and len(connected) <= _SMALL_FLEET):
            self._rates = Rates.expected([(slot.role, report) for slot, _, report in connected])
            hosts = {slot.worker_id: report.status.identity.host for slot, _, report in connected}
            self._links.learn(hosts, [report.edges_bytes_per_s for *_, report in connected])
            self._rates_until_ns = now_ns + _RATES_VALID_NS
        return self._rates

    def of(self, slot: WorkerSlot) -> ParsedReport:
        """Return the last report of a worker.

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
            report = ParsedReport(link.status, link.capabilities, self._links, report)
            self._read[slot.worker_id] = report
        return report


@dataclass(frozen=True, slots=True)
class LoadReader:
    """Reader of the loads of workers: their last reports, and the load booked since.

    Attributes:
        crowding: Share of workers of each role with prompts that wait; None: it is not known.
    """

    book: LoadBook
    rates: Rates = Rates()
    reports: Reports = field(default_factory=Reports)
    crowding: Crowding | None = None

    def of(
        self,
        slot: WorkerSlot,
        cached_blocks: int,
        adapter: str = "",
        sources: tuple[Source, ...] = (),
        tiers: tuple[int, float] = NO_TIERS,
    ) -> WorkerLoad:
        """Return the load of one worker. Arguments as in ``WorkerLoad``.

        Raises:
            ValueError: The worker is not connected.
        """
        link = slot.link
        if link is None:
            raise ValueError(f"{slot.worker_id} is not connected")
        adapter_s = 0.0
        report = self.reports.of(slot)
        if adapter and bytes.fromhex(adapter) not in report.adapters:
            loads = self.book.brings(slot.worker_id, adapter)
            adapter_s = 0.0 if loads else PRIOR_ADAPTER_LOAD_S
        wait_per_s = self.crowding.wait_per_s(slot.role) if self.crowding is not None else 0.0
        booked = self.book.unreported(slot.worker_id)
        known = Known(slot, link.incarnation, report, booked, cached_blocks, tiers)
        return known.load(self.rates, wait_per_s, adapter_s, sources)


class Known(NamedTuple):
    """State of a worker when a prompt is placed."""

    slot: WorkerSlot
    incarnation: bytes
    report: ParsedReport
    booked: Unreported
    cached_blocks: int
    tiers: tuple[int, float] = NO_TIERS

    def load(
        self,
        rates: Rates,
        wait_per_s: float,
        adapter_s: float = 0.0,
        sources: tuple[Source, ...] = (),
    ) -> WorkerLoad:
        """Return the input of the cost model; arguments as in `LoadReader.of`."""
        slot = self.slot
        report = self.report
        booked = self.booked
        line = rates.prompt_line(slot.role, report)
        begun_tokens = max(booked.stream_tokens, 0)
        ended_tokens = max(-booked.stream_tokens, 0)
        return WorkerLoad(
            worker_id=slot.worker_id,
            incarnation=self.incarnation,
            role=slot.role,
            queued_tokens=max(report.queued_tokens + booked.tokens, 0),
            queued_context=max(report.queued_context + booked.context, 0),
            streams=max(report.streams + booked.streams, 0),
            answering=None
            if report.answering is None
            else max(report.answering + booked.streams, 0),
            room_blocks=report.room_blocks,
            total_blocks=report.total_blocks,
            cached_blocks=self.cached_blocks,
            sources=sources,
            tier_blocks=self.tiers[0],
            tier_s=self.tiers[1],
            adapter_s=adapter_s,
            crowding=wait_per_s,
            prefill_tokens_per_s=report.prefill_tokens_per_s or rates.prefill_tokens_per_s,
            prefill_token_s=line.token_s,
            prefill_context_s=line.context_s,
            decode_step_s=report.decode_step_s or rates.decode_step_s,
            decode_line=report.decode_line,
            answering_context=max(report.answering_context - ended_tokens, 0),
            coming_context=report.coming_context + begun_tokens,
            block_bytes=report.block_bytes,
            block_tokens=report.block_tokens,
            format_id=report.format_id,
            edges_bytes_per_s=report.edges_bytes_per_s,
            unmeasured_bytes_per_s=rates.edge_bytes_per_s,
        )
