"""Bandwidth of KV transfer between workers, as measured.

A decode worker reports the rates of its own pulls. The rate of an edge without measurement is
estimated from others: a link belongs to hosts, so workers behind the same link share estimates.
"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean, median_low
from typing import NamedTuple
from zlib import crc32

from batonpb.common_pb2 import EdgeRate, WorkerStatus

_SAMPLED_EDGES = 8  # of a report; a large fleet has hundreds in each


class HostRates(NamedTuple):
    """Medians of measured bytes/s; ``out`` and ``into`` are of edges between two hosts."""

    between: dict[tuple[str, str], float]
    out: dict[str, float]
    into: dict[str, float]


class Links:
    """Expected rates of unused edges, by the hosts at their ends."""

    def __init__(self) -> None:
        self._hosts: Mapping[str, str] = {}
        self._rates = HostRates({}, {}, {})
        self.has_estimates = False

    def learn(self, hosts: Mapping[str, str], reported: "Iterable[ReportedEdges]") -> None:
        """Replace the estimates by those of new measurements. With a single host there are none."""
        self._hosts = hosts if len(set(hosts.values())) > 1 else {}
        self._rates = _host_rates(self._hosts, reported) if self._hosts else HostRates({}, {}, {})
        self.has_estimates = bool(self._hosts)

    def bytes_per_s(self, source_id: str, host: str) -> float:
        """Return the expected rate from a worker to a host; 0 without an estimate.

        If no edge between the two hosts was measured, it is the slower of the edges that leave the
        one and of those that reach the other, each over edges that cross a link.
        """
        source = self._hosts.get(source_id)
        if source is None:
            return 0.0
        rates = self._rates
        if measured := rates.between.get((source, host)):
            return measured
        if source == host:
            return 0.0
        ends = (rates.out.get(source), rates.into.get(host))
        return min((rate for rate in ends if rate is not None), default=0.0)


class ReportedEdges(Mapping[str, float]):
    """Bytes/s to one worker by source, read from its report on first use.

    As a mapping it holds measurements; ``get`` and ``rates`` estimate other edges by ``links``.
    """

    def __init__(self, status: WorkerStatus, links: Links | None = None) -> None:
        self._status = status
        self._links = links or Links()
        self._read: dict[str, float] | None = None
        self.host = status.identity.host
        self.sample = _measured(_spread(status))

    @classmethod
    def none(cls) -> "ReportedEdges":
        """Return the edges of a worker that has not reported."""
        return cls(WorkerStatus())

    def _rates(self) -> dict[str, float]:
        if self._read is None:
            self._read = _measured(self._status.edges)
        return self._read

    def __getitem__(self, source_id: str) -> float:
        return self._rates()[source_id]

    def get(self, source_id: str, default: float | None = None) -> float | None:  # type: ignore[override]
        """Return the rate of an edge, measured here or estimated from others."""
        rate = self._rates().get(source_id)
        if rate or not self._links.has_estimates:
            return rate or default
        return self._links.bytes_per_s(source_id, self.host) or default

    def __iter__(self) -> Iterator[str]:
        return iter(self._rates())

    def __len__(self) -> int:
        return len(self._rates())

    def rates(self, source_ids: Iterable[str]) -> list[float]:
        """Return the rates of several edges, as ``get``; 0 without measurement or estimate."""
        measured = self._rates()
        if not self._links.has_estimates:
            return [measured.get(source_id, 0.0) for source_id in source_ids]
        return [self.get(source_id) or 0.0 for source_id in source_ids]

    def usual_bytes_per_s(self) -> float:
        """Return the mean of a sample of edges; 0 if none was measured."""
        return fmean(self.sample.values()) if self.sample else 0.0


def _measured(edges: Iterable[EdgeRate]) -> dict[str, float]:
    return {edge.prefill_worker_id: rate for edge in edges if (rate := edge.bytes_per_s)}


def _spread(status: WorkerStatus) -> Iterable[EdgeRate]:
    """Return a few edges of a report; different ones per worker, so that all are covered."""
    edges = status.edges
    stride = -(-len(edges) // _SAMPLED_EDGES)
    if stride < 2:
        return edges
    return edges[crc32(status.identity.worker_id.encode()) % stride :: stride]


def _host_rates(hosts: Mapping[str, str], reported: Iterable[ReportedEdges]) -> HostRates:
    between: dict[tuple[str, str], list[float]] = {}
    for edges in reported:
        for source_id, rate in edges.sample.items():
            if (source := hosts.get(source_id)) is not None:
                between.setdefault((source, edges.host), []).append(rate)
    out: dict[str, list[float]] = {}
    into: dict[str, list[float]] = {}
    for (source, host), rates in between.items():
        if source != host:
            out.setdefault(source, []).extend(rates)
            into.setdefault(host, []).extend(rates)
    return HostRates(
        {ends: median_low(rates) for ends, rates in between.items()},
        {host: median_low(rates) for host, rates in out.items()},
        {host: median_low(rates) for host, rates in into.items()},
    )
