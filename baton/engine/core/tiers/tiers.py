"""Saving of blocks to slower tiers before eviction, and restoring them for prompts.

    pool ──save──▶ memory ──save──▶ disk          ahead of eviction, a few blocks at a time
      ▲               │               │
      └───────────────┴──── bring ────┘           when a prompt begins with them

Pure: ``take_copies`` returns the copies to make and ``copied`` receives their results; a thread of
the step loop's process makes them. No step waits for a copy. A block being saved is guarded from
eviction; pages being filled are pinned, and become findable one by one. After a failed copy the
block is computed. No prompt waits longer than computing its blocks takes: late pages stay pinned
until their copies end, and until then nothing else is restored.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from baton.engine.core.block_owners import CacheOwner
from baton.engine.core.blocks import BlockPool
from baton.engine.core.tiers.places import ELSEWHERE, TierPlaces
from baton.types.pool_counts import TierChange, TierCounts

POOL = "pool"
SAVES = 16  # limit of concurrent saves
BRING_NS = 2_000_000_000  # least time limit to restore a prompt's blocks
REST_NS = 5_000_000_000  # pause after a tier failed to store a block
_TRIES = 32  # one in this many slow restores is made anyway, to measure again


class TierCopy(msgspec.Struct, frozen=True):
    """Copy of one block; ``source`` and ``target`` are ``POOL`` or names of tiers."""

    number: int
    block_hash: bytes
    source: str
    source_place: int
    target: str
    target_place: int


class Copied(msgspec.Struct, frozen=True):
    """Result of a copy: ``done``, ``damaged`` or ``gone`` (at the source), or ``failed``."""

    number: int
    outcome: str
    duration_ns: int


@dataclass(slots=True, eq=False)
class _Bring:
    """Restore of one prompt's blocks; ``blocks`` are pinned, in prompt order."""

    key: Hashable
    blocks: list[int]
    left: int
    tokens: dict[str, int]  # restored so far, by tier
    owner: CacheOwner
    until_ns: int = 0  # 0: the first `give_up` sets it
    late: bool = False


@dataclass(slots=True)
class _Running:
    copy: TierCopy
    bring: _Bring | None = None  # None for a save


class KvTiers:
    """Tiers below one pool, the fastest first."""

    def __init__(self, pool: BlockPool, tiers: Sequence[TierPlaces]) -> None:
        self.token_ns = 0.0  # time to compute a prompt token; 0: unknown
        self._pool = pool
        self._tiers = {tier.name: tier for tier in tiers}
        self._order = list(tiers)
        for tier in self._order[:-1]:
            tier.has_next = True
        self._tallies = {tier.name: TierCounts(name=tier.name) for tier in tiers}
        self._rests_until_ns = dict.fromkeys(self._tallies, 0)
        self._running: dict[int, _Running] = {}
        self._brings: dict[Hashable, _Bring] = {}
        self._orders: list[TierCopy] = []
        self._next_number = 0
        self._passed_over = 0
        if self._order:
            pool.save_into(self._order[0])

    def save(self, now_ns: int) -> None:
        """Request copies of the blocks to be evicted next, within the limit of saves."""
        if not self._order:
            return
        first = self._order[0]
        pool = self._pool
        horizon = min(pool.total, first.places) // 2
        for block in pool.oldest_unsaved(self._room(pool.untouched, horizon, first, now_ns)):
            block_hash = pool.hash_of(block)
            if block_hash in first:
                pool.note_saved(block)
                continue
            if (place := first.take(block_hash)) is None:
                break
            pool.guarded.add(block)
            self._start(TierCopy(0, block_hash, POOL, block, first.name, place))
        for upper, lower in zip(self._order, self._order[1:], strict=False):
            horizon = min(upper.places, lower.places) // 2
            room = self._room(upper.untouched, horizon, lower, now_ns)
            for block_hash in upper.oldest_unsaved(2 * SAVES if room else 0):
                if block_hash in lower:
                    upper.note_saved(block_hash)
                elif room and (place := lower.take(block_hash)) is not None:
                    source = upper.hold(block_hash)
                    self._start(TierCopy(0, block_hash, upper.name, source, lower.name, place))
                    room -= 1

    def _room(self, untouched: int, horizon: int, target: TierPlaces, now_ns: int) -> int:
        if now_ns < self._rests_until_ns[target.name]:
            return 0
        under_way = sum(
            running.bring is None and running.copy.target == target.name
            for running in self._running.values()
        )
        return max(min(SAVES, horizon - untouched) - under_way, 0)

    def bring(
        self,
        key: Hashable,
        hashes: Sequence[bytes],
        promised_blocks: int,
        tokens: dict[str, int],
        owner: CacheOwner,
        *,
        always: bool = False,
    ) -> bool:
        """Start restoring the prompt's leading blocks that the pool lacks.

        Args:
            key: Key of the restore for ``brings``.
            hashes: Hashes of the prompt's full blocks.
            promised_blocks: Blocks of the pool that must stay available.
            tokens: Receives the number of restored tokens by tier.
            owner: Owner of the restored blocks.
            always: Restore even if computing is as fast, because a peer requested the blocks.

        Returns:
            False if the pool has no room now; True otherwise, even if there is nothing to restore.
        """
        if any(bring.late for bring in self._brings.values()):
            return True
        run = self._run(hashes, always=always)
        missing = [block_hash for block_hash, tier in run if tier is not None]
        if not missing:
            return True
        pool = self._pool
        here = [pool.match([block_hash])[0] for block_hash, tier in run if tier is None]
        pool.pin(here)
        pages = None
        if len(missing) <= pool.available() - promised_blocks:
            pages = pool.allocate(len(missing))
        if pages is None:
            pool.release(here)
            return False
        bring = _Bring(key, [], len(missing), tokens, owner)
        copies_here = iter(here)
        fresh = iter(pages)
        for block_hash, tier in run:
            if tier is None:
                bring.blocks.append(next(copies_here))
                continue
            page = next(fresh)
            bring.blocks.append(page)
            source = tier.read(block_hash)
            self._start(TierCopy(0, block_hash, tier.name, source, POOL, page), bring)
        self._brings[key] = bring
        return True

    def _run(
        self, hashes: Sequence[bytes], *, always: bool
    ) -> list[tuple[bytes, TierPlaces | None]]:
        """Return the leading blocks that need no computing, with the tier of each."""
        pool = self._pool
        last = 0
        run: list[tuple[bytes, TierPlaces | None]] = []
        for block_hash in hashes:
            tier = None
            if not pool.holds(block_hash):
                tier = next((tier for tier in self._order if block_hash in tier), None)
                if tier is None or not (always or self._pays(tier)):
                    break
                last = len(run) + 1
            run.append((block_hash, tier))
        return run[:last]

    def _pays(self, tier: TierPlaces) -> bool:
        """Return whether restoring a block is faster than computing it, as far as known."""
        compute_ns = self._pool.block_tokens * self.token_ns
        if not compute_ns or tier.block_ns.value <= compute_ns:
            return True
        self._passed_over += 1
        return self._passed_over % _TRIES == 0

    def brings(self, key: Hashable) -> bool:
        """Return whether blocks are being restored for ``key`` in time."""
        bring = self._brings.get(key)
        return bring is not None and not bring.late

    def give_up(self, now_ns: int) -> None:
        """Mark restores that take longer than computing as late; called in each step."""
        for bring in self._brings.values():
            if not bring.until_ns:
                compute_ns = bring.left * self._pool.block_tokens * self.token_ns
                bring.until_ns = now_ns + max(BRING_NS, round(compute_ns))
            elif now_ns > bring.until_ns and not bring.late:
                bring.late = True
                late = {
                    running.copy.source
                    for running in self._running.values()
                    if running.bring is bring
                }
                for tier in late:
                    self._tallies[tier].late += 1

    def forget(self, tags: frozenset[bytes]) -> int:
        """Lose the blocks with these tags; return the number of their storage's erasure.

        The erasure must follow all copies with lower numbers.
        """
        for tier in self._order:
            tier.forget(tags)
        self._next_number += 1
        return self._next_number

    def _start(self, copy: TierCopy, bring: _Bring | None = None) -> None:
        self._next_number += 1
        copy = msgspec.structs.replace(copy, number=self._next_number)
        self._running[copy.number] = _Running(copy, bring)
        self._orders.append(copy)

    def take_copies(self) -> list[TierCopy]:
        """Return new copies, those into the pool first."""
        orders = self._orders
        self._orders = []
        return sorted(orders, key=lambda copy: copy.target != POOL)

    def copied(self, done: Copied, now_ns: int) -> None:
        """Record the result of a copy."""
        running = self._running.pop(done.number)
        copy = running.copy
        if copy.source != POOL:
            self._was_read(copy, done.outcome)
        if running.bring is not None:
            self._came(running.bring, copy, done)
        else:
            self._saved(copy, done, now_ns)

    def _was_read(self, copy: TierCopy, outcome: str) -> None:
        source = self._tiers[copy.source]
        tallies = self._tallies[copy.source]
        tallies.damaged += outcome == "damaged"
        tallies.gone += outcome == "gone"
        if copy.source_place != ELSEWHERE:
            source.let_go(copy.block_hash)
        if outcome not in ("damaged", "gone"):
            return
        if copy.source_place == ELSEWHERE:
            source.note_elsewhere((), [copy.block_hash])
        else:
            source.lose(copy.block_hash)

    def note_elsewhere(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Note blocks that other workers have stored in the last tier, or removed from it."""
        self._order[-1].note_elsewhere(stored, removed)

    def _saved(self, copy: TierCopy, done: Copied, now_ns: int) -> None:
        target = self._tiers[copy.target]
        tallies = self._tallies[copy.target]
        if done.outcome == "done":
            below = self._order[self._order.index(target) + 1 :]
            target.filled(copy.block_hash, saved_below=any(copy.block_hash in t for t in below))
            tallies.saved += 1
        else:
            target.failed(copy.block_hash)
            if done.outcome == "failed":
                tallies.failed += 1
                self._rests_until_ns[target.name] = now_ns + REST_NS
        if copy.source == POOL:
            self._pool.guarded.discard(copy.source_place)
            self._pool.note_saved(copy.source_place)
            self._pool.drop_forgotten(copy.source_place)
        else:
            self._tiers[copy.source].note_saved(copy.block_hash)

    def _came(self, bring: _Bring, copy: TierCopy, done: Copied) -> None:
        if done.outcome == "done":
            tier = self._tiers[copy.source]
            tallies = self._tallies[copy.source]
            tier.block_ns.add(done.duration_ns)
            tallies.brought += 1
            came = bring.tokens.get(tier.name, 0)
            bring.tokens[tier.name] = came + self._pool.block_tokens
            self._pool.note_written([copy.target_place])
            self._pool.set_hash(copy.target_place, copy.block_hash, bring.owner)
        bring.left -= 1
        if not bring.left:
            del self._brings[bring.key]
            self._pool.release(bring.blocks)

    def counts(self) -> tuple[TierCounts, ...]:
        """Return the counters of each tier."""
        lost_above = [self._pool.unsaved_evictions, *(tier.lost for tier in self._order)]
        return tuple(
            msgspec.structs.replace(
                tallies,
                places=tier.places,
                held=len(tier),
                elsewhere=tier.elsewhere,
                lost=lost,
                block_ns=tier.block_ns.value,
            )
            for tier, tallies, lost in zip(
                self._order, self._tallies.values(), lost_above, strict=False
            )
        )

    def take_changes(self, pool_changed: Iterable[bytes]) -> tuple[TierChange, ...]:
        """Return, for each tier, the hashes that it or a tier above it gained or lost.

        ``pool_changed`` are hashes that the pool gained or lost since the last call.
        """
        touched = dict.fromkeys(pool_changed)
        changes = []
        for depth, tier in enumerate(self._order, 1):
            touched.update(dict.fromkeys(tier.take_changes()))
            had = self._order[:depth]
            stored: list[bytes] = []
            removed: list[bytes] = []
            for block_hash in touched:
                held = self._pool.holds(block_hash) or any(block_hash in tier for tier in had)
                (stored if held else removed).append(block_hash)
            if touched:
                changes.append(TierChange(tier.name, tuple(stored), tuple(removed)))
        return tuple(changes)

    def tables(self) -> list[list[int]]:
        """Return the blocks of all restores, for ``BlockPool.check_integrity``."""
        return [bring.blocks for bring in self._brings.values()]

    def check_integrity(self) -> None:
        """Recount places and guards; raise ``RuntimeError`` at a mismatch."""
        for tier in self._order:
            tier.check_integrity()
        saves = [r.copy.source_place for r in self._running.values() if r.copy.source == POOL]
        if sorted(saves) != sorted(self._pool.guarded):
            raise RuntimeError(f"guarded blocks {sorted(self._pool.guarded)}, saves {saves}")
