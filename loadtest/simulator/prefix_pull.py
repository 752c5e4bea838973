"""Simulated pull of a prompt's prefix from other workers' caches.

Uses the same engine commands as ``decode_worker.prefix_pull``: a reservation at the target, HELD
blocks at the source, and one message for all bytes; then the next source that has more.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.types import events as ev
from baton.types.params import SamplingParams
from loadtest.simulator.network import CONTROL_NS, Network
from loadtest.simulator.records import HASH_SEED, Record
from loadtest.simulator.worker import SimulatedWorker

# ``decode_worker.prefix_pull``
_BUDGET_S = 2.0
_BUDGET_TIMES = 4
_PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


class PrefixSource(NamedTuple):
    """Worker that has leading blocks of a prompt."""

    worker: SimulatedWorker
    blocks: int


class _Link:
    """Pull of leading blocks from one source; it ends exactly once, also without blocks."""

    def __init__(
        self,
        record: Record,
        target: SimulatedWorker,
        source: PrefixSource,
        *,
        block_bytes: float,
        network: Network,
        on_end: Callable[[], None],
    ) -> None:
        self._record = record
        self._target = target
        self._source = source.worker
        self._blocks = source.blocks
        self._block_bytes = block_bytes
        self._clock = network.clock
        self._network = network
        self._on_end = on_end
        self._id = f"prefix/{record.id}.{record.attempt}/{self._source.worker_id}"
        self._skip_blocks = 0
        self._generation = 0
        self._began_ns = 0
        self._ended = False

    def begin(self) -> None:
        self._submit(self._target, Kind.REMOTE, self._on_target, emitted=(None,))

    def _submit(
        self,
        worker: SimulatedWorker,
        kind: Kind,
        handler: Callable[[ev.Event], None],
        skip_blocks: int = 0,
        emitted: tuple[None, ...] = (),
    ) -> None:
        hashes = self._record.hashes[: self._blocks]
        spec = RequestSpec(
            kind=kind,
            params=_PARAMS,
            hash_seed=HASH_SEED,
            ticket=self._record.ticket,
            skip_blocks=skip_blocks,
            emitted=emitted,
        )
        prompt = [0] * (self._blocks * worker.core.geometry.block_tokens)
        worker.submit(
            EngineRequest(request_id=self._id, prompt=prompt, spec=spec, block_hashes=hashes),
            handler,
        )

    def _on_target(self, event: ev.Event) -> None:
        match event:
            case ev.Reserved():
                self._generation = event.generation
                self._skip_blocks = event.skip_blocks
                self._clock.after(CONTROL_NS, self._ask)
                self._clock.after(self._budget_ns, self._give_up)
            case ev.Bound():
                self._send()
            case ev.Revoked():
                generation = event.generation
                self._target.send(lambda scheduler: scheduler.drained(self._id, generation))
                self._give_up()
            case ev.Ended():
                self._end()
            case _:
                pass

    def _ask(self) -> None:
        if self._ended:
            return
        if not self._source.alive:
            self._give_up()
            return
        self._submit(self._source, Kind.HELD, self._on_source, self._skip_blocks)

    def _on_source(self, event: ev.Event) -> None:
        match event:
            case ev.PromptDone() if not self._ended:
                bind = partial(Scheduler.bind, request_id=self._id, generation=self._generation)
                self._clock.after(CONTROL_NS, lambda: self._target.send(bind))
            case ev.Ended() if event.error_code:
                self._clock.after(CONTROL_NS, self._give_up)
            case _:
                pass

    def _send(self) -> None:
        self._began_ns = self._clock.now_ns
        ends = self._source.worker_id, self._target.worker_id
        self._network.send(*ends, self._bytes, self._arrived)

    @property
    def _budget_ns(self) -> int:
        ends = self._source.worker_id, self._target.worker_id
        wire_s = self._network.seconds(*ends, self._blocks * self._block_bytes)
        return round((_BUDGET_S + _BUDGET_TIMES * wire_s) * 1e9)

    @property
    def _bytes(self) -> float:
        return (self._blocks - self._skip_blocks) * self._block_bytes

    def _arrived(self) -> None:
        if self._ended or not self._source.alive:
            return
        self._release()
        seconds = (self._clock.now_ns - self._began_ns) / 1e9
        self._target.note_transfer(self._source.worker_id, self._bytes, seconds)
        self._record.pulled_blocks += self._blocks - self._skip_blocks
        self._target.send(
            lambda scheduler: scheduler.commit(self._id, self._generation, (), self._clock.now_ns)
        )

    def _release(self) -> None:
        self._source.send(lambda scheduler: scheduler.release(self._id))

    def _give_up(self) -> None:
        if not self._ended:
            self._release()
            self._target.send(lambda scheduler: scheduler.cancel(self._id))
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_end()


class SimulatedPull:
    """Pulls of one request, one source after the other.

    ``on_end`` is called at the end of the last pull, also without blocks.
    """

    def __init__(
        self,
        record: Record,
        target: SimulatedWorker,
        sources: Sequence[PrefixSource],
        *,
        block_bytes: float,
        network: Network,
        on_end: Callable[[], None],
    ) -> None:
        self._left = iter(sources)
        self._target = target
        self._link = partial(
            _Link, record, target, block_bytes=block_bytes, network=network, on_end=self.begin
        )
        self._on_end = on_end

    def begin(self) -> None:
        """Pull from the next source, or end."""
        source = next(self._left, None)
        if source is None or not self._target.alive:
            self._on_end()
        else:
            self._link(source).begin()
