"""Two real engine cores and both hand-off machines, with every message in the test's hands."""

from collections import deque
from dataclasses import dataclass, field

from baton.engine.core.sequence import EngineRequest, Kind
from baton.engine.core.speculative.proposers import Speculation
from baton.types import events as ev
from kvtransfer import chunk, receiver_actions, sender
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import HandoffReceiver, ReceiverState
from kvtransfer.sender import HandoffSender, SenderState
from tests.kvtransfer.frames import byte_frame, lent_frame
from tests.kvtransfer.step_by_step import Engine, golden, spec_of

LEASE_NS = 3_000_000_000
DEEDS = ("damaged", "gone at the peer")  # what a peer does while it lives


@dataclass
class Handover:
    """One request on both sides, and what is in flight between them."""

    name: str
    prompt: list[int]
    ticket: int
    intake: HandoffReceiver
    out: HandoffSender | None = None
    life: int = 0  # of the prefill worker that has it
    target_life: int = 1  # of the one that the router named
    out_generation: int = 0
    out_id: str = ""
    left: list[tuple[HandoffSender, str]] = field(default_factory=list)  # pages still lent, say
    opened: int = 0  # number of the stream, so that an old one's words are not heard
    heard: deque = field(default_factory=deque)  # prefill -> decode: (stream, action)
    asked: deque = field(default_factory=deque)  # slices: (generation, life, kv_slice, epoch)
    arrived: deque = field(default_factory=deque)  # frames being checked: (frame, ...)
    first: int | None = None
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    cancelled: bool = False
    needs_peer: bool = False


class Duo:
    """The two workers. Tests call the verbs in any order they like."""

    def __init__(
        self,
        prefill_blocks: int = 12,
        decode_blocks: int = 12,
        speculation: Speculation | None = None,
    ) -> None:
        self.prefill_blocks = prefill_blocks
        self.prefill = Engine(prefill_blocks)
        self.decode = Engine(decode_blocks, speculation)
        self.life = 1
        self.now_ns = 1
        self.serial = 0
        self.requests: dict[str, Handover] = {}
        self.commands: deque = deque()  # shell -> decode engine, read before its next step
        self.reports: deque = deque()  # decode engine -> shell

    # -- verbs ---------------------------------------------------------------

    def submit(self, prompt: list[int]) -> Handover:
        ticket = len(self.requests)
        name = f"r{ticket}"
        intake = HandoffReceiver(self.decode.view.geometry, len(prompt), window_frames=3)
        handover = Handover(name, prompt, ticket, intake)
        self.requests[name] = handover
        handover.target_life = self.life
        spec = spec_of(Kind.REMOTE, ticket=ticket)
        request = EngineRequest(request_id=name, prompt=prompt, spec=spec)
        self.commands.append(lambda: self.decode.core.scheduler.submit(request, self.now_ns))
        return handover

    def step_decode(self) -> None:
        """The engine reads its commands and steps; the shell has not heard of it yet."""
        while self.commands:
            self.commands.popleft()()
        self.reports.extend(self.decode.step(self.now_ns))

    def hear_engine(self) -> None:
        while self.reports:
            event = self.reports.popleft()
            handover = self.requests.get(getattr(event, "request_id", ""))
            if handover is None:
                continue
            match event:
                case ev.Reserved():
                    self.act(
                        handover,
                        handover.intake.reserved(event.generation, event.skip_blocks, self.now_ns),
                    )
                case ev.Bound():
                    self.act(handover, handover.intake.bound(event.generation, event.blocks))
                case ev.Revoked():
                    self.act(handover, handover.intake.revoked(event.generation))
                case ev.Tokens():
                    assert event.index == len(handover.tokens), "no hole, no repeat"
                    handover.tokens += [token.token for token in event.tokens]
                case ev.Ended():
                    handover.ends.append(event.error_code)

    def step_prefill(self) -> None:
        for event in self.prefill.step(self.now_ns):
            name = getattr(event, "request_id", "").split("/")[0]
            handover = self.requests.get(name)
            if handover is None or handover.out is None:
                continue
            if event.request_id != handover.out_id:
                continue
            match event:
                case ev.Admitted():
                    handover.out.admitted(event.blocks)
                case ev.Published():
                    self.say(handover, handover.out.published(event))
                case ev.PromptDone():
                    self.say(handover, handover.out.prompt_done(event))

    def hear(self, handover: Handover) -> None:
        """One message of the control stream reaches decode."""
        if not handover.heard:
            return
        stream, action = handover.heard.popleft()
        if stream != handover.opened:
            return
        match action:
            case "accepted" | "resumed":
                resumed = action == "resumed"
                self.act(handover, handover.intake.accepted(resumed, self.now_ns))
            case "ended" | "died":
                gone = handover.target_life != self.life
                self.act(handover, handover.intake.stream_lost(peer_gone=gone, reason="ended"))
            case sender.Announce():
                self.act(handover, handover.intake.published(action.kv_slice, self.now_ns))
            case sender.AnnounceFirst():
                if handover.first is None:
                    handover.first = action.done.first[0].token
                    handover.tokens.append(handover.first)
            case sender.AnnounceCommit():
                self.act(
                    handover,
                    handover.intake.commit_record(
                        action.rectangles,
                        action.payload_bytes,
                        action.valid_tokens,
                        action.manifest,
                    ),
                )

    def fetch(self, handover: Handover, damage: str = "", lend: bool = False) -> None:
        """A frame that was asked for arrives, perhaps damaged or twice: a copy, or pages lent."""
        if not handover.asked:
            return
        generation, life, kv_slice, epoch = handover.asked.popleft()
        out, out_id = handover.out, handover.out_id
        if life != self.life or damage == "lost":  # nobody answers any more, or not in time
            self.act(handover, handover.intake.pull_failed([kv_slice], "broken", epoch))
            return
        if out is None or not out.may_read(kv_slice):
            if handover.intake.frame_arrived(kv_slice, epoch):
                self.act(handover, handover.intake.frame_gone(kv_slice, epoch))
            return
        claim = (handover.name, 1, generation, bytes([life]) * 16)
        make = lent_frame if lend else byte_frame
        for _ in range(2 if damage == "twice" else 1):
            out.read_begins()
            frame = make(self.prefill.view, out.blocks, kv_slice, claim, damage == "flip")
            if lend:
                out.lend(1)
            self.give(out_id, out.read_ended())
            loan = (self.prefill, out, out_id) if lend else None
            bound = chunk.binding(*claim)
            if handover.intake.frame_arrived(kv_slice, epoch):
                handover.arrived.append(
                    (handover.intake.blocks, kv_slice, frame, bound, epoch, loan)
                )
            else:
                self.let_go(loan)

    def store(self, handover: Handover) -> None:
        """A frame that arrived is checked and written, in a thread of its own as it were.

        Pages that were lent are read only now: they may long have gone to somebody else.
        """
        if not handover.arrived:
            return
        table, kv_slice, frame, bound, epoch, loan = handover.arrived.popleft()
        self.assert_ours(handover, table, kv_slice)
        try:
            frame.store(self.decode.view, table, kv_slice, bound)
        except chunk.ChunkError:
            self.act(handover, handover.intake.frame_bad(kv_slice, epoch))
        else:
            self.act(handover, handover.intake.frame_stored(kv_slice, epoch, self.now_ns))
        self.let_go(loan)
        self.finish_cancel(handover)

    def let_go(self, loan: tuple | None) -> None:
        """The reader is done with pages that were lent; their owner may be another life by now."""
        if loan is not None and loan[0] is self.prefill:
            self.give(loan[2], loan[1].loan_ended(1))

    def heartbeat(self, handover: Handover) -> None:
        """The prefill worker says that it lives."""
        if handover.out is not None and handover.target_life == self.life:
            self.act(handover, handover.intake.peer_lives(self.now_ns))

    def lose_stream(self, handover: Handover) -> None:
        """Whoever loses it asks whether the incarnation still answers."""
        handover.heard.clear()
        gone = handover.target_life != self.life
        self.act(handover, handover.intake.stream_lost(peer_gone=gone, reason="cut"))

    def kill_prefill(self) -> None:
        """Pulls and control streams break, each when its turn comes.

        What had been said is still heard, what had been sent still arrives.
        """
        self.prefill, self.life = Engine(self.prefill_blocks), self.life + 1
        for handover in self.requests.values():
            handover.out, handover.left = None, []
            handover.heard.append((handover.opened, "died"))

    def replace(self, handover: Handover) -> None:
        if handover.needs_peer:
            handover.needs_peer = False
            handover.target_life = self.life
            self.act(handover, handover.intake.replaced(self.now_ns))

    def lose_ask(self, handover: Handover) -> None:
        """The ask for another prefill worker, or its answer, is lost."""
        handover.needs_peer = False

    def compute_locally(self, handover: Handover) -> None:
        if handover.needs_peer:
            handover.needs_peer = False
            self.act(handover, handover.intake.compute_locally())

    def cancel(self, handover: Handover) -> None:
        if not handover.cancelled and not handover.ends:
            handover.cancelled = True
            self.act(handover, handover.intake.cancel())
            self.finish_cancel(handover)

    def lapse(self) -> None:
        """Nobody renews for longer than the lease."""
        self.now_ns += LEASE_NS + 1
        for handover in self.requests.values():
            self.tick_sender(handover)
            if handover.out is not None and handover.out.state is not SenderState.OPEN:
                handover.heard.append((handover.opened, "ended"))

    def overdue(self) -> None:
        """Loans of what has ended are not waited for any longer."""
        for _ in range(2):
            self.now_ns += sender.DRAIN_NS
            for handover in self.requests.values():
                if handover.out is None or handover.out.state is not SenderState.OPEN:
                    self.tick_sender(handover)

    def tick_sender(self, handover: Handover) -> None:
        if handover.out is not None:
            self.give(handover.out_id, handover.out.tick(self.now_ns))
        for out, out_id in handover.left:
            self.give(out_id, out.tick(self.now_ns))

    # -- inside ----------------------------------------------------------------

    def act(self, handover: Handover, actions: list[receiver_actions.Action]) -> None:
        scheduler = self.decode.core.scheduler
        for action in actions:
            match action:
                case receiver_actions.OpenStream():
                    self.open(handover, action)
                case receiver_actions.BindPages():
                    self.tell(scheduler.bind, handover.name, action.generation)
                case receiver_actions.Pull():
                    handover.asked.extend(
                        (handover.intake.generation, handover.life, kv_slice, action.epoch)
                        for kv_slice in action.kv_slices
                    )
                case receiver_actions.CommitKv():
                    assert handover.first is not None
                    first = [handover.first]
                    generation = action.generation
                    self.tell(scheduler.commit, handover.name, generation, first, self.now_ns)
                case receiver_actions.CloseStream():
                    handover.heard.clear()
                    handover.opened += 1
                    if handover.out is not None:
                        end = handover.out.release if action.release else handover.out.cancel
                        self.give(handover.out_id, end())
                case receiver_actions.AskForPeer():
                    assert handover.intake.state is ReceiverState.NO_PEER
                    own_deed = any(word in action.reason for word in DEEDS)
                    if handover.target_life != self.life and not own_deed:
                        assert action.peer_died, f"a death told as: {action.reason}"
                    handover.needs_peer = True
                case receiver_actions.Drained():
                    self.tell(scheduler.drained, handover.name, action.generation)
                case receiver_actions.TakeOver():
                    first = None if handover.first is None else [handover.first]
                    self.tell(scheduler.compute_locally, handover.name, first)

    def tell(self, command, *arguments) -> None:
        """Send a command to the decode engine."""
        self.commands.append(lambda: command(*arguments))

    def open(self, handover: Handover, action: receiver_actions.OpenStream) -> None:
        handover.opened += 1  # pulls go on: they do not hang on the control stream
        stream = handover.opened
        if handover.target_life != self.life:  # the address of a dead incarnation
            handover.heard.append((stream, "died"))
            return
        known = (
            handover.out is not None
            and handover.life == self.life
            and handover.out.state is SenderState.OPEN
            and handover.out_generation == action.generation
        )
        handover.heard.append((stream, "resumed" if known else "accepted"))
        if known:
            handover.out.renew(self.now_ns)
            handover.heard.extend((stream, said) for said in handover.out.replay())
            return
        if handover.out is not None:
            handover.left.append((handover.out, handover.out_id))
        handover.life = self.life
        handover.out_generation = action.generation
        handover.out = HandoffSender(
            self.prefill.view.geometry,
            len(handover.prompt),
            action.skip_blocks,
            LEASE_NS,
            self.now_ns,
        )
        self.serial += 1
        handover.out_id = f"{handover.name}/{self.serial}"
        spec = spec_of(Kind.PREFILL, ticket=handover.ticket, skip_blocks=action.skip_blocks)
        request = EngineRequest(request_id=handover.out_id, prompt=handover.prompt, spec=spec)
        self.prefill.core.scheduler.submit(request, self.now_ns)

    def say(self, handover: Handover, actions: list[sender.Action]) -> None:
        handover.heard.extend((handover.opened, action) for action in actions)

    def give(self, out_id: str, actions: list[sender.Action]) -> None:
        for action in actions:
            if isinstance(action, sender.GiveBack):
                self.prefill.core.scheduler.cancel(out_id)

    def finish_cancel(self, handover: Handover) -> None:
        if handover.cancelled and not handover.intake.writing:
            self.tell(self.decode.core.scheduler.cancel, handover.name)

    def assert_ours(self, handover: Handover, table: tuple[int, ...], kv_slice: KvSlice) -> None:
        """A page is written only while it is reserved, or in quarantine."""
        reservations = self.decode.core.batch.reservations
        reserved = reservations._by_request.get(handover.name)
        mine = set(reserved.pages) if reserved else set()
        for (revoked_name, _), draining in reservations._draining.items():
            if revoked_name == handover.name:
                mine.update(draining)
        pages = set(table[kv_slice.block_begin : kv_slice.block_begin + kv_slice.block_count])
        assert pages <= mine, "a write after the pages were given back"

    def check(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.core.batch.check_integrity()
            counts = engine.core.pool.counts()
            parts = counts.free + counts.cached + counts.in_use + counts.quarantined
            assert parts == counts.total
        for handover in self.requests.values():
            assert len(handover.ends) <= 1, "a request ends once"
            self.assert_pulled(handover)

    def assert_pulled(self, handover: Handover) -> None:
        """Each slice that was asked for has a pull that is under way: else it never comes."""
        intake = handover.intake
        if not intake.pulls(intake.epoch):
            return
        under_way = {kv_slice for _, _, kv_slice, epoch in handover.asked if epoch == intake.epoch}
        under_way |= {one[1] for one in handover.arrived if one[4] == intake.epoch}
        orphans = intake._asked - under_way
        assert not orphans, f"nothing pulls {orphans}"

    def settle(self) -> None:
        """No more trouble: everything runs to its end."""
        for _ in range(400):
            self.now_ns += 250_000_000
            self.step_prefill()
            self.step_decode()
            self.hear_engine()
            for handover in self.requests.values():
                if handover.out is not None:
                    handover.out.renew(self.now_ns)
                self.tick_sender(handover)
                if handover.intake.state is ReceiverState.NO_PEER:
                    self.act(handover, handover.intake.tick(self.now_ns))
                self.replace(handover)
                self.hear(handover)
                self.heartbeat(handover)
                self.fetch(handover)
                self.store(handover)
            if all(h.ends for h in self.requests.values()):
                break
        for _ in range(3):
            self.step_prefill()
            self.step_decode()
            self.hear_engine()
        self.check()

    def stuck(self) -> list[str]:
        return [h.name for h in self.requests.values() if not h.ends]


__all__ = ["Duo", "Engine", "Handover", "ReceiverState", "golden"]
