"""The decode side of one KV transfer, as a state machine: events and time in, actions out.

    RESERVING ──reserved──▶ OPENING ──accepted──▶ PULLING ──all verified + record──▶ COMMITTED
       ▲                      │ stream lost, prefill failed, stalled, bad data │         │
       │                      ▼                                                │         │
       │                   NO_PEER ──replacement──▶ OPENING                    │         │
       ├────revoked───────────┴──compute locally / refused / cancelled──▶ DONE ◀         │
       └────revoked before the engine saw the commit─────────────────────────────────────┘

Decode pulls: it decides which frame lands where, so nothing arrives that it did not request, and a
frame counts only if its digest matches the requested slice. Only this machine's frames are written
into the reserved pages. Ending the machine requires waiting until ``writing`` is zero.

An engine may load the KV by itself, with parameters that the peer's engine returned:

    PULLING ──handed over──▶ LOADING ──loaded──▶ COMMITTED
                                └──load failed──▶ NO_PEER
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.types.geometry import KvGeometry
from kvtransfer.chunk import manifest_digest
from kvtransfer.coverage import Coverage
from kvtransfer.kv_slice import FRAME_BYTES, KvSlice, by_part, cut
from kvtransfer.receiver_actions import (
    Action,
    AskForPeer,
    BindPages,
    CloseStream,
    CommitKv,
    Drained,
    KvLoaded,
    LoadKv,
    OpenStream,
    Pull,
    TakeOver,
)

MAX_TRIES = 4  # of one frame
MAX_REOPENS = 2
MAX_BROKEN_PULLS = 3  # in a row, each followed by a heartbeat of the peer
ASK_AGAIN_NS = 5_000_000_000


class ReceiverState(enum.Enum):
    """State of the receiving side."""

    RESERVING = "reserving"
    OPENING = "opening"
    PULLING = "pulling"
    LOADING = "loading"
    NO_PEER = "no_peer"
    COMMITTED = "committed"
    DONE = "done"


_OPEN = (ReceiverState.OPENING, ReceiverState.PULLING, ReceiverState.LOADING)  # the stream is


@dataclass(slots=True)
class HandoffReceiver:
    """State of one request's KV on its way to this worker.

    Args:
        window_frames: Most frames that are requested and not yet stored. While much is to be
            pulled, requests are for at least half of it, so that a pull is worth its round trip.
        frame_bytes: Size of the pieces in which rectangles are requested from now on.
        stall_ns: Time without progress after which the peer is given up.
        parts: Heads that lie in one rank's pool, if not all do. No frame extends beyond one, and
            the commit waits for the frames of all.
    """

    geometry: KvGeometry
    prompt_tokens: int
    window_frames: int = 16
    frame_bytes: int = FRAME_BYTES
    stall_ns: int = 10_000_000_000
    parts: Sequence[range] = ()
    state: ReceiverState = ReceiverState.RESERVING
    generation: int = 0
    skip_blocks: int = 0
    blocks: tuple[int, ...] = ()
    writing: int = 0
    _late_writing: int = 0  # of them, for an earlier epoch
    payload_bytes: int = 0
    repairs: int = 0
    progress_ns: int = 0
    epoch: int = 0  # incremented whenever everything starts over
    _bind_asked: bool = False
    _published: Coverage = field(init=False)
    _todo: deque[KvSlice] = field(default_factory=deque)
    _asked: set[KvSlice] = field(default_factory=set)
    _tries: dict[KvSlice, int] = field(default_factory=dict)
    _committed: bool = False
    _reopens: int = 0
    _drains: int | None = None
    _take_over: bool = False
    _broken_pulls: int = 0  # in a row; a stored frame ends the row
    _ask: AskForPeer | None = None  # the last one
    _ask_ns: int = 0  # time of the last ask; 0: unknown before the next tick
    _broken_reason: str = ""
    _paused: bool = False  # since a pull broke, until the control stream shows the peer's state
    _peer_gone: bool = False  # its incarnation ended while the engine was loading

    def __post_init__(self) -> None:
        self._published = Coverage(self.geometry, self.prompt_tokens)

    def reserved(self, generation: int, skip_blocks: int, now_ns: int) -> list[Action]:
        """Open the stream: the engine made a reservation for this request."""
        if self.state is ReceiverState.DONE:
            return []
        self.generation = generation
        self.skip_blocks = skip_blocks
        self.blocks = ()
        self._bind_asked = False
        self._restart(now_ns)
        if self.state is ReceiverState.NO_PEER:
            return []
        self.state = ReceiverState.OPENING
        return [OpenStream(generation, skip_blocks)]

    def accepted(self, resumed: bool, now_ns: int) -> list[Action]:
        """Start pulling: the peer has our request; unless ``resumed`` it starts from nothing."""
        if not resumed:
            reopens = self._reopens
            self._restart(now_ns)
            self._reopens = reopens
        self.progress_ns = now_ns
        self._paused = False
        if self.state is ReceiverState.OPENING:
            self.state = ReceiverState.PULLING
            return [*self._pulls(), *self._finish()]
        return []

    def peer_lives(self, now_ns: int) -> list[Action]:
        """Handle a heartbeat: pull again, if a pull had broken.

        While nothing is requested from the peer, its queue and its engine may take their time.
        """
        if not self._asked:
            self.progress_ns = now_ns
        self._paused = False
        if self._broken_pulls > MAX_BROKEN_PULLS:
            return self._give_up(self._broken_reason, died=False)
        return self._pulls()

    def published(self, kv_slice: KvSlice, now_ns: int) -> list[Action]:
        """Add a rectangle that the peer computed; repeats after a resumed stream are ignored."""
        if self.state is not ReceiverState.PULLING or kv_slice in self._published:
            return []
        self.progress_ns = now_ns
        if not self._published.fits(kv_slice):
            reason = f"the peer published {kv_slice}, which is outside the model or the prompt"
            return self._give_up(reason, died=False)
        if not self._published.add(kv_slice):
            return self._give_up(f"the peer published parts of {kv_slice} twice", died=False)
        for piece in by_part(kv_slice, self.parts) if self.parts else (kv_slice,):
            self._todo.extend(cut(piece, self.geometry, self.frame_bytes))
        if not self._bind_asked:
            self._bind_asked = True
            return [BindPages(self.generation)]
        return self._pulls()

    def bound(self, generation: int, blocks: tuple[int, ...]) -> list[Action]:
        """Take the pages that the engine bound to the reservation."""
        if generation != self.generation or self.state is ReceiverState.DONE:
            return []
        self.blocks = blocks
        return [*self._pulls(), *self._finish()]

    def frame_arrived(self, kv_slice: KvSlice, epoch: int) -> bool:
        """Return whether a received frame was requested and may be written (``writing`` + 1)."""
        if not self.pulls(epoch) or kv_slice not in self._asked:
            return False
        self.writing += 1
        return True

    def frame_stored(self, kv_slice: KvSlice, epoch: int, now_ns: int) -> list[Action]:
        """Count a verified frame that is in its pages (``writing`` - 1)."""
        self._wrote(epoch)
        if self.pulls(epoch) and kv_slice in self._asked:
            self._asked.discard(kv_slice)
            self.progress_ns = now_ns
            self._broken_pulls = 0
            self._reopens = 0
            self.payload_bytes += kv_slice.payload_bytes(self.geometry)
        return [*self._settle(), *self._pulls(), *self._finish()]

    def frame_bad(self, kv_slice: KvSlice, epoch: int) -> list[Action]:
        """Request a frame again, up to a limit, after it failed its check (``writing`` - 1)."""
        self._wrote(epoch)
        if not self.pulls(epoch) or kv_slice not in self._asked:
            return [*self._settle(), *self._pulls(), *self._finish()]
        self._asked.discard(kv_slice)
        self.repairs += 1
        self._tries[kv_slice] = self._tries.get(kv_slice, 0) + 1
        if self._tries[kv_slice] >= MAX_TRIES:
            reason = f"a frame was damaged {MAX_TRIES} times: {kv_slice}"
            return [*self._give_up(reason, died=False), *self._settle()]
        self._todo.appendleft(kv_slice)
        return self._pulls()

    def frame_gone(self, kv_slice: KvSlice, epoch: int) -> list[Action]:
        """Handle that the peer does not hold this frame any more (``writing`` - 1)."""
        self._wrote(epoch)
        if not self._lost([kv_slice], epoch):
            return [*self._settle(), *self._pulls(), *self._finish()]
        self._reopens += 1
        if self._reopens > MAX_REOPENS:
            gone = self._give_up("the peer does not hold the blocks any more", died=False)
            return [*self._settle(), *gone]
        return [*self._settle(), *self._pulls()]

    def pull_failed(self, kv_slices: Sequence[KvSlice], reason: str, epoch: int) -> list[Action]:
        """Handle a pull that ended without these frames: broken, timed out, or incomplete.

        That proves neither the peer's death nor its life. Pulling pauses until the control stream
        decides: a heartbeat continues it (or gives up a live peer that serves no pull), a broken
        stream ends it. Pulls that fail together count once.
        """
        if self._lost(kv_slices, epoch) and not self._paused:
            self._paused = True
            self._broken_pulls += 1
            self._broken_reason = reason
        return []

    def _lost(self, kv_slices: Sequence[KvSlice], epoch: int) -> bool:
        """Put frames back that are still expected; return whether any was."""
        if not self.pulls(epoch):
            return False
        lost = [kv_slice for kv_slice in kv_slices if kv_slice in self._asked]
        self._asked.difference_update(lost)
        self._todo.extendleft(reversed(lost))
        return bool(lost)

    def commit_record(
        self, rectangles: int, payload_bytes: int, valid_tokens: int, manifest: int
    ) -> list[Action]:
        """Check the peer's record of everything it published; commit only if the sums agree."""
        if self.state is not ReceiverState.PULLING:
            return []
        ours = (
            len(self._published),
            self._published.payload_bytes,
            self.prompt_tokens,
            manifest_digest(self._published.kv_slices),
        )
        theirs = (rectangles, payload_bytes, valid_tokens, manifest)
        if ours != theirs or not self._published.complete(self.skip_blocks):
            return self._give_up("the commit record does not match what was published", died=False)
        self._committed = True
        if not self._bind_asked:  # nothing travels: decode already has every block
            self._bind_asked = True
            return [BindPages(self.generation)]
        return self._finish()

    def handed_over(self) -> list[Action]:
        """Let the engine load the KV: the peer's engine holds all of it."""
        if self.state is not ReceiverState.PULLING:
            return []
        self.state = ReceiverState.LOADING
        self._peer_gone = False
        return [LoadKv(self.generation)]

    def loaded(self, generation: int) -> list[Action]:
        """End the transfer: the engine has loaded the KV by itself."""
        if self.state is not ReceiverState.LOADING or generation != self.generation:
            return []
        self.state = ReceiverState.COMMITTED
        return [KvLoaded(), CloseStream(release=True)]

    def load_failed(self, generation: int, reason: str) -> list[Action]:
        """Give up a peer whose KV the engine could not load."""
        if self.state is not ReceiverState.LOADING or generation != self.generation:
            return []
        self.state = ReceiverState.PULLING
        return self._give_up(reason, died=self._peer_gone)

    def stream_lost(self, peer_gone: bool, reason: str) -> list[Action]:
        """Handle a broken stream: ask a live peer to resume, and replace a dead one.

        While the engine loads the KV by itself, only the engine knows whether that fails.
        """
        if self.state is ReceiverState.LOADING:
            self._peer_gone = peer_gone
        if self.state not in (ReceiverState.OPENING, ReceiverState.PULLING):
            return []
        self._reopens += 1
        if peer_gone or self._reopens > MAX_REOPENS:
            return self._give_up(reason, died=peer_gone)
        self.state = ReceiverState.OPENING
        return [OpenStream(self.generation, self.skip_blocks)]

    def prefill_failed(self, reason: str) -> list[Action]:
        """Give up a peer that refused or failed this request."""
        return self._give_up(reason, died=False)

    def replaced(self, now_ns: int) -> list[Action]:
        """Start over, with the same pages, with another prefill worker from the router."""
        if self.state is not ReceiverState.NO_PEER:
            return []
        if not self.generation:  # revoked meanwhile: wait for a new reservation
            self.state = ReceiverState.RESERVING
            return []
        self._restart(now_ns)
        self.state = ReceiverState.OPENING
        return [OpenStream(self.generation, self.skip_blocks)]

    def ask_again(self) -> list[Action]:
        """Request another peer again: the router may have missed the first request."""
        if self.state is not ReceiverState.NO_PEER or self._ask is None:
            return []
        return [replace(self._ask, again=True)]

    def compute_locally(self) -> list[Action]:
        """Compute here, as the router decided; the answer to a repeated request is ignored."""
        if self.state is not ReceiverState.NO_PEER:
            return []
        closing = self._close(release=False)
        self._take_over = True
        return [*closing, *self._settle()]

    def revoked(self, generation: int) -> list[Action]:
        """Return the reservation to the engine, which makes a new one by itself."""
        if generation != self.generation:
            return [Drained(generation)]
        closing: list[Action] = []
        if self.state in _OPEN:
            closing = [CloseStream(release=False)]
        if self.state not in (ReceiverState.NO_PEER, ReceiverState.DONE):
            self.state = ReceiverState.RESERVING
        self.generation = 0
        self._drains = generation
        return [*closing, *self._settle()]

    def cancel(self) -> list[Action]:
        """End the machine; wait for ``writing`` == 0 before freeing the pages."""
        return self._close(release=False)

    def pulls(self, epoch: int) -> bool:
        """Return whether frames of a pull of that epoch are still wanted.

        They are also while the control stream is reopened: pulls do not depend on it.
        """
        is_open = self.state in (ReceiverState.OPENING, ReceiverState.PULLING)
        return is_open and epoch == self.epoch

    def held_back(self, now_ns: int) -> None:
        """Record that the credit for frames is used up here, which is no stall of the peer."""
        self.progress_ns = now_ns

    def tick(self, now_ns: int) -> list[Action]:
        """Give up a peer that makes no progress; ask the router again if it does not answer."""
        if self.state is ReceiverState.NO_PEER:
            self._ask_ns = self._ask_ns or now_ns
            if now_ns - self._ask_ns < ASK_AGAIN_NS:
                return []
            self._ask_ns = now_ns
            return self.ask_again()
        waiting = self.state in (ReceiverState.OPENING, ReceiverState.PULLING)
        if waiting and now_ns - self.progress_ns > self.stall_ns:
            return self._give_up(f"no progress for {self.stall_ns / 1e9:.1f} s", died=False)
        return []

    def _wrote(self, epoch: int) -> None:
        self.writing -= 1
        if epoch != self.epoch:
            self._late_writing -= 1

    def _restart(self, now_ns: int) -> None:
        self._published = Coverage(self.geometry, self.prompt_tokens)
        self._todo = deque()
        self._asked = set()
        self._broken_pulls = 0
        self._paused = False
        self._committed = False
        self._reopens = 0
        self._tries = {}
        self.epoch += 1
        self._late_writing = self.writing
        self.progress_ns = now_ns

    def _pulls(self) -> list[Action]:
        if self.state is not ReceiverState.PULLING or not self.blocks or self._paused:
            return []
        if self._late_writing:  # a damaged frame clears its pages, which may be filled again by now
            return []
        free = self.window_frames - len(self._asked)
        if free < min(len(self._todo), self.window_frames // 2):
            return []
        kv_slices = [self._todo.popleft() for _ in range(min(free, len(self._todo)))]
        self._asked.update(kv_slices)
        return [Pull(tuple(kv_slices), self.epoch)] if kv_slices else []

    def _finish(self) -> list[Action]:
        ready = self._committed and self.blocks and not (self._todo or self._asked or self.writing)
        if self.state is not ReceiverState.PULLING or not ready:
            return []
        self.state = ReceiverState.COMMITTED
        return [CommitKv(self.generation), CloseStream(release=True)]

    def _give_up(self, reason: str, died: bool) -> list[Action]:
        if self.state not in (ReceiverState.OPENING, ReceiverState.PULLING):
            return []
        self.state = ReceiverState.NO_PEER
        self._todo.clear()
        self._asked.clear()
        self._ask = AskForPeer(reason, died)
        self._ask_ns = 0
        return [CloseStream(release=False), self._ask]

    def _close(self, release: bool) -> list[Action]:
        was_open = self.state in _OPEN
        self.state = ReceiverState.DONE
        self._asked.clear()
        return [CloseStream(release)] if was_open else []

    def _settle(self) -> list[Action]:
        """Return the actions that had to wait until nothing writes."""
        if self.writing:
            return []
        actions: list[Action] = []
        if self._drains is not None:
            actions.append(Drained(self._drains))
            self._drains = None
        if self._take_over:
            self._take_over = False
            actions.append(TakeOver())
        return actions
