"""One attempt at a request: on one worker alone, or prompt and answer on two with a hand-off.

Both hand-off machines are the real ones. Their unit here is a sixteenth of a block: a rectangle of
a layer group and the blocks of one chunk is one frame, and one message on the network. What the
shells do between machines, engines and wire takes ``CONTROL_NS`` a message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.types import events as ev
from baton.types.geometry import BLOCK_TOKENS, KvGeometry
from baton.types.params import SamplingParams
from kvtransfer import receiver, sender
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import HandoffReceiver
from kvtransfer.sender import HandoffSender
from loadtest.simulator.clock import VirtualClock
from loadtest.simulator.network import CONTROL_NS, Network
from loadtest.simulator.prefix_pull import PrefixPull
from loadtest.simulator.records import HASH_SEED, Record
from loadtest.simulator.worker import LAYER_GROUPS, SimulatedWorker

DETECT_NS = 50_000_000  # a connection that is refused tells of a death
LEASE_NS = 5_000_000_000  # ``router.settings``: what nobody renews lapses
_FIRST_TOKEN = 0


@dataclass(slots=True)
class _UnderWay:
    """A pull: what says how fast the edge is, is all of it, and not a frame behind its siblings."""

    frames: int
    began_ns: int
    payload_bytes: float = 0.0


class AttemptListener(Protocol):
    """What an attempt tells the router."""

    def on_started(self, record: Record, worker_id: str, cached_tokens: int) -> None:
        """The prompt left a worker's queue."""

    def on_tokens(self, record: Record, first_ns: int, last_ns: int, count: int) -> None:
        """Tokens of the answer."""

    def on_peer_needed(self, record: Record, attempt: "Attempt", *, died: bool) -> None:
        """The prefill worker will not do."""

    def on_end(self, record: Record, attempt: "Attempt", error: str) -> None:
        """The decode worker's one end of the attempt."""


class Attempt:
    """One attempt.

    Args:
        record: The request.
        decode: The worker that holds it.
        prefill: The one that computes the prompt for it; None: ``decode`` does.
        block_tokens: Of the pools.
        kv_bytes_per_token: Of the model.
        clock: Of the simulation.
        network: Between the workers.
        listener: The router.
        prefix: Who has leading blocks that whoever computes the prompt is to pull, and how many,
            in order.
    """

    def __init__(
        self,
        record: Record,
        decode: SimulatedWorker,
        prefill: SimulatedWorker | None,
        prefix: Sequence[tuple[SimulatedWorker, int]] = (),
        *,
        block_tokens: int,
        kv_bytes_per_token: int,
        clock: VirtualClock,
        network: Network,
        listener: AttemptListener,
    ) -> None:
        self.record = record
        self.decode = decode
        self.prefill = prefill
        self.over = False
        self._prefix = prefix
        self._block_bytes = kv_bytes_per_token * block_tokens
        self._id = f"{record.id}.{record.attempt}"
        self._clock = clock
        self._network = network
        self._listener = listener
        self._unit_tokens = max(block_tokens // BLOCK_TOKENS, 1)
        geometry = KvGeometry(
            num_layers=LAYER_GROUPS,
            num_kv_heads=1,
            head_dim=1,
            num_blocks=1,
            dtype="bf16",
            block_tokens=block_tokens // self._unit_tokens,
        )
        self._geometry = geometry
        self._units = -(-record.prompt_tokens // self._unit_tokens)
        self._unit_bytes = kv_bytes_per_token * self._unit_tokens / (LAYER_GROUPS * 4)
        self._receiver = HandoffReceiver(geometry, self._units)
        self._sender: HandoffSender | None = None
        self._sender_id = ""
        self._streams = 0
        self._emitted = record.tokens  # by a worker that died: the answer goes on behind them
        self._first_said = self._emitted > 0
        self._pulls_ns = 0  # when the first pull began

    def start(self) -> None:
        """The submission arrives at the decode worker."""
        kind = Kind.FULL if self.prefill is None else Kind.REMOTE
        submit = partial(
            self._submit, self.decode, self._id, kind, self._on_decode, emitted=self._emitted
        )
        if self.prefill is None:
            self._with_prefix(self.decode, submit)
        else:
            submit()

    def _with_prefix(self, worker: SimulatedWorker, submit: Callable[[], None]) -> None:
        """Submit, once what others hold of the prompt is there, or will not come."""
        links = [link for link in self._prefix if link[0] is not worker]
        self._prefix = ()
        if not links:
            submit()
            return
        PrefixPull(
            self.record,
            worker,
            links,
            block_bytes=self._block_bytes,
            clock=self._clock,
            network=self._network,
            on_end=lambda: None if self.over or not worker.alive else submit(),
        ).begin()

    def _submit(
        self,
        worker: SimulatedWorker,
        engine_id: str,
        kind: Kind,
        handler: Callable[[ev.Event], None],
        skip_blocks: int = 0,
        emitted: int = 0,
    ) -> None:
        record = self.record
        params = SamplingParams(max_tokens=record.answer_tokens, ignore_eos=True)
        spec = RequestSpec(
            kind=kind,
            params=params,
            hash_seed=HASH_SEED,
            ticket=record.ticket,
            skip_blocks=skip_blocks,
            emitted=((_FIRST_TOKEN,) * emitted,) if emitted else (),
        )
        request = EngineRequest(
            request_id=engine_id,
            prompt=[0] * record.prompt_tokens,
            spec=spec,
            block_hashes=list(record.hashes),
        )
        worker.submit(request, handler)

    # ---------------------------------------------------------------- the router speaks

    def replace_prefill(self, prefill: SimulatedWorker) -> None:
        """Another prefill worker is to compute the prompt."""
        self.prefill = prefill
        self._perform(self._receiver.replaced(self._clock.now_ns))

    def compute_locally(self) -> None:
        """The decode worker is to compute the prompt."""
        self.prefill = None
        self._perform(self._receiver.compute_locally())

    def cancel(self) -> None:
        """The router has no use for it any more."""
        self.over = True
        self._perform(self._receiver.cancel())
        self.decode.tell(lambda scheduler: scheduler.cancel(self._id))

    # ---------------------------------------------------------------- workers die

    def prefill_died(self, worker: SimulatedWorker) -> None:
        """The prefill worker is gone, and the connection to it with it."""
        if worker is self.prefill and not self.over:
            self._sender = None
            self._perform(self._receiver.stream_lost(True, "the prefill worker died"))

    def decode_died(self) -> None:
        """Nobody renews the lease at the prefill worker."""
        self.over = True
        self._close(False, LEASE_NS)

    # ---------------------------------------------------------------- the decode engine speaks

    def _on_decode(self, event: ev.Event) -> None:
        match event:
            case ev.Admitted() if self.prefill is None:
                self._listener.on_started(self.record, self.decode.worker_id, event.cached_tokens)
            case ev.Reserved():
                now_ns = self._clock.now_ns
                self._perform(self._receiver.reserved(event.generation, event.skip_blocks, now_ns))
            case ev.Bound():
                self._perform(self._receiver.bound(event.generation, event.blocks))
            case ev.Revoked():
                self._perform(self._receiver.revoked(event.generation))
            case ev.Tokens():
                count = len(event.tokens)
                first_ns = self.decode.run_began_ns
                self._say(first_ns, self._clock.now_ns, count)
            case ev.Ended():
                self._end(event.error_code)
            case _:
                pass

    def _say(self, first_ns: int, last_ns: int, count: int) -> None:
        if not self.over:
            delay_ns = CONTROL_NS
            self._listener.on_tokens(self.record, first_ns + delay_ns, last_ns + delay_ns, count)

    def _end(self, error: str) -> None:
        if not self.over:
            self.over = True
            self._perform(self._receiver.cancel())
            self._clock.after(CONTROL_NS, lambda: self._listener.on_end(self.record, self, error))

    # ---------------------------------------------------------------- the receiving machine

    def _perform(self, actions: list[receiver.Action]) -> None:
        for action in actions:
            match action:
                case receiver.Open():
                    self._open(action)
                case receiver.Bind():
                    self._tell_generation(Scheduler.bind, action.generation)
                case receiver.Pull():
                    self._pull(action)
                case receiver.Commit():
                    self._commit(action.generation)
                case receiver.CloseStream():
                    self._close(action.release, CONTROL_NS)
                case receiver.AskForPeer():
                    self._listener.on_peer_needed(self.record, self, died=action.peer_died)
                case receiver.Drained():
                    self._tell_generation(Scheduler.drained, action.generation)
                case receiver.TakeOver():
                    first = self._first_tokens()
                    self.decode.tell(
                        partial(Scheduler.compute_locally, request_id=self._id, first=first)
                    )

    def _tell_generation(
        self, command: Callable[[Scheduler, str, int], None], generation: int
    ) -> None:
        self.decode.tell(lambda scheduler: command(scheduler, self._id, generation))

    def _first_tokens(self) -> tuple[int, ...] | None:
        return (_FIRST_TOKEN,) if self._first_said else None

    def _commit(self, generation: int) -> None:
        now_ns = self._clock.now_ns
        first = self._first_tokens() or ()
        self.record.transfer_ns += now_ns - self._pulls_ns if self._pulls_ns else 0
        self.decode.tell(
            lambda scheduler: scheduler.commit(self._id, generation, first, self._clock.now_ns)
        )

    def _open(self, opened: receiver.Open) -> None:
        prefill = self.prefill
        if prefill is None:
            return
        self._streams += 1
        stream = self._streams
        self._clock.after(CONTROL_NS, partial(self._opened, opened, prefill, stream))

    def _opened(self, opened: receiver.Open, prefill: SimulatedWorker, stream: int) -> None:
        if self.over or stream != self._streams:
            return
        if not prefill.alive:
            self._clock.after(CONTROL_NS, partial(self.prefill_died, prefill))
            return
        now_ns = self._clock.now_ns
        self._sender_id = f"{self._id}.{stream}"
        self._sender = sending = HandoffSender(
            self._geometry, self._units, opened.skip_blocks, LEASE_NS, now_ns
        )
        handler = partial(self._on_prefill, sending, stream)
        sender_id = self._sender_id
        skip_blocks = opened.skip_blocks

        def submit() -> None:
            if stream == self._streams:
                self._submit(prefill, sender_id, Kind.PREFILL, handler, skip_blocks)

        self._with_prefix(prefill, submit)
        self._later(stream, lambda: self._receiver.accepted(False, self._clock.now_ns))

    def _later(self, stream: int, act: Callable[[], list[receiver.Action]]) -> None:
        """Word of the prefill worker arrives at the receiving machine."""

        def arrive() -> None:
            if not self.over and stream == self._streams:
                self._perform(act())

        self._clock.after(CONTROL_NS, arrive)

    # ---------------------------------------------------------------- the prefill engine speaks

    def _on_prefill(self, sending: HandoffSender, stream: int, event: ev.Event) -> None:
        match event:
            case ev.Admitted():
                sending.admitted(event.blocks)
                worker = self.prefill
                if worker is not None and stream == self._streams:
                    self._listener.on_started(self.record, worker.worker_id, event.cached_tokens)
            case ev.Published():
                for action in sending.published(self._in_units(event)):
                    self._announce(stream, action)
            case ev.PromptDone():
                for action in sending.prompt_done(event):
                    self._announce(stream, action)
            case ev.Ended() if event.error_code:
                self._later(stream, lambda: self._receiver.prefill_failed(event.error_message))
            case _:
                pass

    def _in_units(self, event: ev.Published) -> ev.Published:
        return ev.Published(
            request_id=event.request_id,
            layer_begin=event.layer_begin,
            layer_count=event.layer_count,
            block_begin=event.block_begin,
            block_count=event.block_count,
            valid_tokens=-(-event.valid_tokens // self._unit_tokens),
        )

    def _announce(self, stream: int, action: sender.Action) -> None:
        match action:
            case sender.Announce():
                kv_slice = action.kv_slice
                self._later(stream, lambda: self._receiver.published(kv_slice, self._clock.now_ns))
            case sender.AnnounceFirst():
                self._clock.after(CONTROL_NS, partial(self._on_first, stream))
            case sender.AnnounceCommit():
                said = action
                self._later(
                    stream,
                    lambda: self._receiver.commit_record(
                        said.rectangles, said.payload_bytes, said.valid_tokens, said.manifest
                    ),
                )
            case sender.GiveBack():
                pass

    def _on_first(self, stream: int) -> None:
        if self.over or self._first_said or stream != self._streams:
            return
        self._first_said = True
        now_ns = self._clock.now_ns
        self._say(now_ns, now_ns, 1)
        if self.record.answer_tokens == 1:  # prefill's own word is the whole answer
            self._end("")
            self.decode.tell(lambda scheduler: scheduler.cancel(self._id))

    def _close(self, release: bool, delay_ns: int) -> None:
        """The stream's last word is on its way to the prefill worker."""
        sending = self._sender
        worker = self.prefill
        engine_id = self._sender_id
        self._sender = None
        if sending is None or worker is None:
            return

        def arrive() -> None:
            said = sending.release() if release else sending.cancel()
            self._give_back(said, worker, engine_id)

        self._clock.after(delay_ns, arrive)

    def _give_back(
        self, actions: list[sender.Action], worker: SimulatedWorker, engine_id: str
    ) -> None:
        """Nobody reads the pages at the prefill worker any more."""
        for action in actions:
            if isinstance(action, sender.GiveBack):
                verb = Scheduler.cancel if action.cancel else Scheduler.release
                worker.tell(partial(verb, request_id=engine_id))

    # ---------------------------------------------------------------- KV moves

    def _pull(self, pull: receiver.Pull) -> None:
        self._pulls_ns = self._pulls_ns or self._clock.now_ns
        under_way = _UnderWay(len(pull.kv_slices), self._clock.now_ns)
        for kv_slice in pull.kv_slices:
            self._fetch(kv_slice, pull.epoch, under_way)

    def _fetch(self, kv_slice: KvSlice, epoch: int, pull: _UnderWay) -> None:
        sending = self._sender
        prefill = self.prefill
        if sending is None or prefill is None or not sending.may_read(kv_slice):
            self._perform(self._receiver.pull_failed([kv_slice], "not there", epoch))
            return
        sending.read_begins()
        payload_bytes = kv_slice.payload_bytes(self._geometry) * self._unit_bytes
        now_ns = self._clock.now_ns
        target = self.decode.worker_id
        end_ns = self._network.send(prefill.worker_id, target, payload_bytes, now_ns + CONTROL_NS)
        reading = (sending, prefill, self._sender_id)
        self._clock.at(
            end_ns, partial(self._arrived, kv_slice, epoch, *reading, payload_bytes, pull)
        )

    def _arrived(
        self,
        kv_slice: KvSlice,
        epoch: int,
        sending: HandoffSender,
        source: SimulatedWorker,
        engine_id: str,
        payload_bytes: float,
        pull: _UnderWay,
    ) -> None:
        self._give_back(sending.read_ended(), source, engine_id)
        pull.frames -= 1
        pull.payload_bytes += payload_bytes
        if not pull.frames:
            seconds = (self._clock.now_ns - pull.began_ns) / 1e9
            self.decode.note_transfer(source.worker_id, pull.payload_bytes, seconds)
        if not self._receiver.frame_arrived(kv_slice, epoch):
            return
        self.record.transfer_bytes += payload_bytes
        self._perform(self._receiver.frame_stored(kv_slice, epoch, self._clock.now_ns))
