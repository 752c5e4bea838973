"""Virtual time, the only clock of the simulator; and the network between workers.

It has a latency, a rate, and one transfer at a time per end.

The constants are linear fits to NCCL's send/recv times on H100 from microsoft/vidur
(``data/profiling/network/h100_dgx/send_recv.csv``, MIT): medians of 994 sizes from 2 KB to 67 MB,
least squares of relative errors. Half of the points lie within 3 % of the line, 95 % within 13 %.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

CONTROL_NS = 250_000  # a message without KV; measured: a unary gRPC call takes 250 us here


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Latency and rate of one direction between two workers."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, payload_bytes: float) -> float:
        """Return the time for a message alone."""
        return self.latency_s + payload_bytes / self.bytes_per_s


LINKS = {
    "between-nodes": Link(latency_s=19.1e-6, bytes_per_s=35.9e9),  # one GPU on each of two nodes
    "nvlink": Link(latency_s=7.6e-6, bytes_per_s=357.5e9),  # two GPUs of one node
    "loopback": Link(latency_s=250e-6, bytes_per_s=1.9e9),  # gRPC bytes on the 2-core machine
}


class VirtualClock:
    """Queue of events by time, and by order of scheduling for equal times."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0  # events so far
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = 0

    def at(self, time_ns: int, call: Callable[[], None]) -> None:
        """Schedule a call at a time that is not past."""
        if time_ns < self.now_ns:
            raise ValueError(f"cannot schedule at {time_ns} ns: the clock is at {self.now_ns} ns")
        self._scheduled += 1
        heapq.heappush(self._due, (time_ns, self._scheduled, call))

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Schedule a call after a delay."""
        self.at(self.now_ns + delay_ns, call)

    def run(self) -> None:
        """Process events until none is left."""
        while self._due:
            self.now_ns, _, call = heapq.heappop(self._due)
            self.events += 1
            call()


class Network:
    """Network of all workers. A worker sends one message at a time, and receives one.

    Workers are distributed over ``nodes``, with NVLink inside a node; with 0 nodes
    each worker has its own.
    """

    def __init__(self, link: Link, clock: VirtualClock, nodes: int = 0) -> None:
        self.clock = clock
        self.link = link
        self._nodes = nodes
        self._sends_until_ns: defaultdict[str, int] = defaultdict(int)
        self._receives_until_ns: defaultdict[str, int] = defaultdict(int)

    def node(self, worker_id: str) -> str:
        """Return the node of a worker; "" if each worker has its own."""
        if not self._nodes:
            return ""
        return f"node-{int(worker_id.rpartition('-')[2]) % self._nodes}"

    def seconds(self, source: str, target: str, payload_bytes: float) -> float:
        """Return the time for a message alone."""
        near = self._nodes and self.node(source) == self.node(target)
        return (LINKS["nvlink"] if near else self.link).seconds(payload_bytes)

    def send(
        self, source: str, target: str, payload_bytes: float, arrived: Callable[[], None]
    ) -> None:
        """Send a message; call ``arrived`` at its arrival."""
        free_ns = max(self._sends_until_ns[source], self._receives_until_ns[target])
        begin_ns = max(free_ns, self.clock.now_ns + CONTROL_NS)
        end_ns = begin_ns + round(self.seconds(source, target, payload_bytes) * 1e9)
        self._sends_until_ns[source] = self._receives_until_ns[target] = end_ns
        self.clock.at(end_ns, arrived)
