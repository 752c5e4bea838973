"""The prefill side of one hand-off, as a state machine: events and time in, actions out.

    OPEN ──prompt done──▶ OPEN (all published) ──release──────────────▶ CLOSED
      └──cancel, lease lapse, failure──▶ REVOKED ──last read ended──▶ CLOSED
                                            └──only loans left, overdue──▶ CLOSED

Blocks are given back in two phases. While frames are being read from the pages the hand-off is only
*revoked*: readers notice before they send. The engine hears of it when nobody reads any more.

Readers in this process end by themselves. Pages may also be *lent* to a process that maps the pool:
it lets go, or the kernel says that it is gone. One that does neither, because it is frozen or
broken, is left behind ``DRAIN_NS`` after the end: it can only read, and verifies what it has read
over a copy of its own (``kvtransfer/lent_pages.py``), so that its pages may belong to others.
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
    """Where the sending side stands."""

    OPEN = "open"
    REVOKED = "revoked"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell decode that this rectangle may be pulled."""

    kv_slice: KvSlice


@dataclass(frozen=True, slots=True)
class AnnounceFirst:
    """Tell decode the first tokens."""

    done: PromptDone


@dataclass(frozen=True, slots=True)
class AnnounceCommit:
    """Tell decode that the list of rectangles is complete."""

    rectangles: int
    payload_bytes: int
    valid_tokens: int
    manifest: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The engine may have the pages.

    Args:
        cancel: It was not finished.
        overdue: So many loans of slices were not ended; 0: nobody reads the pages.
    """

    cancel: bool
    overdue: int = 0


Action = Announce | AnnounceFirst | AnnounceCommit | GiveBack


@dataclass(slots=True)
class HandoffSender:
    """One prompt's KV on the prefill side.

    Args:
        geometry: Of the pool.
        prompt_tokens: Length of the prompt.
        skip_blocks: Leading blocks that decode has.
        lease_ns: How long it lives without a renewal.
        now_ns: The time.
        first_head: The first head that this edge carries; ``geometry`` says how many.
        parts: Heads that lie in one rank's pool, if not all do; each part is announced for itself.
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
    revoked_ns: int = 0  # when it was first seen to be
    first_head: int = 0
    parts: Sequence[range] = ()

    def __post_init__(self) -> None:
        self.renewed_ns = self.now_ns
        self.published_kv = Coverage(self.geometry, self.prompt_tokens, self.first_head)

    def admitted(self, blocks: tuple[int, ...]) -> None:
        """The engine gave the prompt its pages."""
        self.blocks = blocks

    def published(self, event: Published) -> list[Action]:
        """A rectangle is computed."""
        if self.state is not SenderState.OPEN:
            return []
        whole = event.layer_count == ALL_LAYERS
        rectangle = KvSlice(
            event.layer_begin,
            self.geometry.num_layers if whole else event.layer_count,
            self.first_head,
            self.geometry.num_kv_heads,
            event.block_begin,
            event.block_count,
            event.valid_tokens,
        )
        # A step that was planned again after a neighbour's failure says the same once more.
        pieces = by_part(rectangle, self.parts) if self.parts else (rectangle,)
        return [Announce(piece) for piece in pieces if self.published_kv.add(piece)]

    def prompt_done(self, event: PromptDone) -> list[Action]:
        """Everything is computed and published."""
        if self.state is not SenderState.OPEN:
            return []
        self.done = event
        return [AnnounceFirst(event), self._commit()]

    def _commit(self) -> AnnounceCommit:
        kv = self.published_kv
        digest = manifest_digest(kv.kv_slices)
        return AnnounceCommit(len(kv), kv.payload_bytes, self.prompt_tokens, digest)

    def replay(self) -> list[Action]:
        """All that was said so far, for a stream that broke and came back."""
        said: list[Action] = [Announce(kv_slice) for kv_slice in self.published_kv.kv_slices]
        if self.done is not None:
            said += [AnnounceFirst(self.done), self._commit()]
        return said

    def may_read(self, kv_slice: KvSlice) -> bool:
        """Whether ``kv_slice`` lies within what was published and is still held."""
        return self.state is SenderState.OPEN and self.published_kv.covers(kv_slice)

    def read_begins(self) -> None:
        """A frame is about to be read from the pages."""
        self.reading += 1

    def read_ended(self) -> list[Action]:
        """A frame was read; ``state`` says whether it may still be sent."""
        self.reading -= 1
        return self._settle()

    def lend(self, slices: int) -> None:
        """Pages of so many slices are about to be read by another process."""
        self.lent += slices

    def loan_ended(self, slices: int) -> list[Action]:
        """It reads them no more."""
        self.lent -= slices
        return self._settle()

    def renew(self, now_ns: int) -> None:
        """Decode is alive and still needs this."""
        self.renewed_ns = now_ns

    def release(self) -> list[Action]:
        """Decode holds everything."""
        return self._revoke()

    def cancel(self) -> list[Action]:
        """Decode has no use for it any more."""
        return self._revoke()

    def tick(self, now_ns: int) -> list[Action]:
        """Let the lease lapse when it has not been renewed; leave overdue readers behind."""
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
