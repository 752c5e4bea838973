"""The prefill side of one KV transfer, as a state machine: events and time in, actions out.

    OPEN ──prompt done──▶ OPEN (all published) ──release──────────────▶ CLOSED
      └──cancel, lease lapse, failure──▶ REVOKED ──last read ended──▶ CLOSED
                                            └──only loans left, overdue──▶ CLOSED

Blocks are given back in two phases. While frames are being read from the pages, the transfer is
only *revoked*, and readers check that before they send. The engine gets the pages back when the
last read has ended.

Reads in this process end by themselves. Pages may also be *lent* to a process that maps the pool.
It ends the loan, or the kernel reports that it is gone. A frozen or broken reader does neither, and
``DRAIN_NS`` after the end its loans are ignored: it can only read, and verifies its own copy
(``kvtransfer/lent_pages.py``), so its pages may be used again.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.types.events import ALL_LAYERS, PromptDone, Published
from baton.types.geometry import KvGeometry
from kvtransfer.chunk import manifest_digest
from kvtransfer.coverage import Coverage
from kvtransfer.kv_slice import KvSlice, by_part

DRAIN_NS = 250_000_000


class SenderState(enum.Enum):
    """State of the sending side."""

    OPEN = "open"
    REVOKED = "revoked"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Announce:
    """Announce to decode that this rectangle may be pulled."""

    kv_slice: KvSlice


@dataclass(frozen=True, slots=True)
class AnnounceFirst:
    """Send decode the first tokens."""

    done: PromptDone


@dataclass(frozen=True, slots=True)
class AnnounceCommit:
    """Announce to decode that the list of rectangles is complete."""

    rectangles: int
    payload_bytes: int
    valid_tokens: int
    manifest: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Return the pages to the engine.

    Args:
        cancel: Whether the prompt was not finished.
        overdue: Number of lent slices whose loan did not end; 0: nothing reads the pages.
    """

    cancel: bool
    overdue: int = 0


Action = Announce | AnnounceFirst | AnnounceCommit | GiveBack


@dataclass(slots=True)
class HandoffSender:
    """State of one prompt's KV on the prefill side.

    Args:
        skip_blocks: Leading blocks that decode has.
        lease_ns: Time after which the transfer ends unless it is renewed.
        parts: Heads that lie in one rank's pool, if not all do; each part is announced separately.
    """

    geometry: KvGeometry
    prompt_tokens: int
    skip_blocks: int
    lease_ns: int
    now_ns: int
    state: SenderState = SenderState.OPEN
    blocks: tuple[int, ...] = ()
    published_kv: Coverage = field(init=False)
    done: PromptDone | None = None
    reading: int = 0
    lent: int = 0
    renewed_ns: int = 0
    revoked_ns: int = 0  # time of the first tick after it
    parts: Sequence[range] = ()

    def __post_init__(self) -> None:
        self.renewed_ns = self.now_ns
        self.published_kv = Coverage(self.geometry, self.prompt_tokens)

    def admitted(self, blocks: tuple[int, ...]) -> None:
        """Take the pages that the engine gave the prompt."""
        self.blocks = blocks

    def published(self, event: Published) -> list[Action]:
        """Announce a computed rectangle."""
        if self.state is not SenderState.OPEN:
            return []
        whole = event.layer_count == ALL_LAYERS
        rectangle = KvSlice(
            event.layer_begin,
            self.geometry.num_layers if whole else event.layer_count,
            0,
            self.geometry.num_kv_heads,
            event.block_begin,
            event.block_count,
            event.valid_tokens,
        )
        # A step that is planned again after another sequence's failure publishes this twice.
        pieces = by_part(rectangle, self.parts) if self.parts else (rectangle,)
        return [Announce(piece) for piece in pieces if self.published_kv.add(piece)]

    def prompt_done(self, event: PromptDone) -> list[Action]:
        """Announce first tokens and commit record: everything is computed and published."""
        if self.state is not SenderState.OPEN:
            return []
        self.done = event
        return [AnnounceFirst(event), self._commit()]

    def _commit(self) -> AnnounceCommit:
        kv = self.published_kv
        digest = manifest_digest(kv.kv_slices)
        return AnnounceCommit(len(kv), kv.payload_bytes, self.prompt_tokens, digest)

    def replay(self) -> list[Action]:
        """Return all announcements so far, for a stream that broke and resumed."""
        actions: list[Action] = [Announce(kv_slice) for kv_slice in self.published_kv.kv_slices]
        if self.done is not None:
            actions += [AnnounceFirst(self.done), self._commit()]
        return actions

    def may_read(self, kv_slice: KvSlice) -> bool:
        """Return whether ``kv_slice`` lies within what was published and is still held."""
        return self.state is SenderState.OPEN and self.published_kv.covers(kv_slice)

    def read_begins(self) -> None:
        """Count a frame that is about to be read from the pages."""
        self.reading += 1

    def read_ended(self) -> list[Action]:
        """Count the end of a read; ``state`` decides whether the frame may still be sent."""
        self.reading -= 1
        return self._settle()

    def lend(self, slices: int) -> None:
        """Count slices whose pages another process is about to read."""
        self.lent += slices

    def loan_ended(self, slices: int) -> list[Action]:
        """Count slices that the other process does not read any more."""
        self.lent -= slices
        return self._settle()

    def renew(self, now_ns: int) -> None:
        """Extend the lease: decode is alive and still needs the KV."""
        self.renewed_ns = now_ns

    def release(self) -> list[Action]:
        """End the transfer: decode has everything."""
        return self._revoke()

    def cancel(self) -> list[Action]:
        """End the transfer: decode does not need it any more."""
        return self._revoke()

    def tick(self, now_ns: int) -> list[Action]:
        """Let the lease lapse when it has not been renewed; ignore overdue loans."""
        if self.state is SenderState.OPEN and now_ns - self.renewed_ns > self.lease_ns:
            self.revoked_ns = now_ns
            return self._revoke()
        if self.state is SenderState.REVOKED:
            self.revoked_ns = self.revoked_ns or now_ns
            if now_ns - self.revoked_ns >= DRAIN_NS:
                return self._settle(wait_for_loans=False)
        return []

    def _revoke(self) -> list[Action]:
        if self.state is SenderState.OPEN:
            self.state = SenderState.REVOKED
            return self._settle()
        return []

    def _settle(self, wait_for_loans: bool = True) -> list[Action]:
        if self.state is not SenderState.REVOKED or self.reading:
            return []
        if self.lent and wait_for_loans:
            return []
        self.state = SenderState.CLOSED
        return [GiveBack(cancel=self.done is None, overdue=self.lent)]
