"""The prefill side of one hand-off, as a state machine: events and time in, actions out.

    OPEN ──prompt done──▶ OPEN (all published) ──release──────────────▶ CLOSED
      └──cancel, lease lapse, failure──▶ REVOKED ──last read ended──▶ CLOSED

Blocks are given back in two phases. While frames are being read from the pages the hand-off is only
*revoked*: readers notice before they send. The engine hears of it when nobody reads any more.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.events import ALL_LAYERS, PromptDone, Published
from engine.core.geometry import BLOCK_TOKENS, KvGeometry
from kvtransfer.chunk import manifest_digest
from kvtransfer.kv_slice import KvSlice


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
    """Nobody reads the pages: the engine may have them (``cancel`` = it was not finished)."""

    cancel: bool


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
    """

    geometry: KvGeometry
    prompt_tokens: int
    skip_blocks: int
    lease_ns: int
    now_ns: int
    state: SenderState = SenderState.OPEN
    blocks: tuple[int, ...] = ()
    kv_slices: list[KvSlice] = field(default_factory=list)
    done: PromptDone | None = None
    reading: int = 0
    renewed_ns: int = 0

    def __post_init__(self) -> None:
        self.renewed_ns = self.now_ns

    def admitted(self, blocks: tuple[int, ...]) -> None:
        """The engine gave the prompt its pages."""
        self.blocks = blocks

    def published(self, event: Published) -> list[Action]:
        """A rectangle is computed."""
        if self.state is not SenderState.OPEN:
            return []
        whole = event.layer_count == ALL_LAYERS
        kv_slice = KvSlice(
            event.layer_begin,
            self.geometry.num_layers if whole else event.layer_count,
            0,
            self.geometry.num_kv_heads,
            event.block_begin,
            event.block_count,
            event.valid_tokens,
        )
        if kv_slice in self.kv_slices:  # a step that was planned again after a neighbour's failure
            return []
        self.kv_slices.append(kv_slice)
        return [Announce(kv_slice)]

    def prompt_done(self, event: PromptDone) -> list[Action]:
        """Everything is computed and published."""
        if self.state is not SenderState.OPEN:
            return []
        self.done = event
        return [AnnounceFirst(event), self._commit()]

    def _commit(self) -> AnnounceCommit:
        total = sum(kv_slice.payload_bytes(self.geometry) for kv_slice in self.kv_slices)
        digest = manifest_digest(self.kv_slices)
        return AnnounceCommit(len(self.kv_slices), total, self.prompt_tokens, digest)

    def replay(self) -> list[Action]:
        """All that was said so far, for a stream that broke and came back."""
        said: list[Action] = [Announce(kv_slice) for kv_slice in self.kv_slices]
        if self.done is not None:
            said += [AnnounceFirst(self.done), self._commit()]
        return said

    def may_read(self, kv_slice: KvSlice) -> bool:
        """Whether ``kv_slice`` lies within what was published and is still held."""
        return self.state is SenderState.OPEN and any(_covers(p, kv_slice) for p in self.kv_slices)

    def read_begins(self) -> None:
        """A frame is about to be read from the pages."""
        self.reading += 1

    def read_ended(self) -> list[Action]:
        """A frame was read; ``state`` says whether it may still be sent."""
        self.reading -= 1
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
        """Let the lease lapse when it has not been renewed."""
        if self.state is SenderState.OPEN and now_ns - self.renewed_ns > self.lease_ns:
            return self._revoke()
        return []

    def _revoke(self) -> list[Action]:
        if self.state is SenderState.OPEN:
            self.state = SenderState.REVOKED
            return self._settle()
        return []

    def _settle(self) -> list[Action]:
        if self.state is SenderState.REVOKED and not self.reading:
            self.state = SenderState.CLOSED
            return [GiveBack(cancel=self.done is None)]
        return []


def _covers(outer: KvSlice, inner: KvSlice) -> bool:
    def within(begin: int, count: int, outer_begin: int, outer_count: int) -> bool:
        return outer_begin <= begin and begin + count <= outer_begin + outer_count

    ends_inside = (
        inner.block_begin + inner.block_count < outer.block_begin + outer.block_count
        or _tail(inner) <= _tail(outer)
    )
    return (
        inner.kv_group == outer.kv_group
        and within(inner.layer_begin, inner.layer_count, outer.layer_begin, outer.layer_count)
        and within(inner.head_begin, inner.head_count, outer.head_begin, outer.head_count)
        and within(inner.block_begin, inner.block_count, outer.block_begin, outer.block_count)
        and ends_inside
    )


def _tail(kv_slice: KvSlice) -> int:
    """Valid tokens in the last block."""
    return kv_slice.valid_tokens - (kv_slice.block_count - 1) * BLOCK_TOKENS


def all_covered(kv_slices: Sequence[KvSlice], geometry: KvGeometry, tokens: int, skip: int) -> bool:
    """Whether rectangles tile layers x blocks of a prompt behind ``skip`` blocks exactly once."""
    block_tokens = geometry.block_tokens
    blocks = -(-tokens // block_tokens)
    seen = [[0] * blocks for _ in range(geometry.num_layers)]
    for kv_slice in kv_slices:
        if not kv_slice.fits(geometry) or kv_slice.block_begin + kv_slice.block_count > blocks:
            return False
        end_token = kv_slice.block_begin * block_tokens + kv_slice.valid_tokens
        if end_token != min((kv_slice.block_begin + kv_slice.block_count) * block_tokens, tokens):
            return False
        for layer in range(kv_slice.layer_begin, kv_slice.layer_begin + kv_slice.layer_count):
            for block in range(kv_slice.block_begin, kv_slice.block_begin + kv_slice.block_count):
                seen[layer][block] += 1
    return all(
        count == (1 if block >= skip else 0) for layer in seen for block, count in enumerate(layer)
    )
