"""Items that wait for blocks, and the blocks that are restored for them from KV tiers."""

import bisect
from collections.abc import Callable, Hashable

from baton.engine.core.blocks import BlockPool
from baton.engine.core.reservations import Reservation, Reservations
from baton.engine.core.sequence import EngineRequest, TokenSequence
from baton.engine.core.tiers.tiers import KvTiers

_MAX_RESTORES = 4  # queued requests whose blocks are restored from tiers at once

WaitingItem = TokenSequence | Reservation


class WaitingQueue:
    """Sequences and reservations in the order of their requests.

    Attributes:
        items: The queue.
        fetching: HELD requests whose blocks are being restored from a tier.
        overtaking: Reservations outside the queue that wait only for blocks from a tier.
    """

    def __init__(self, pool: BlockPool, reservations: Reservations, tiers: KvTiers) -> None:
        self._pool = pool
        self._reservations = reservations
        self._tiers = tiers
        self.items: list[WaitingItem] = []
        self.fetching: dict[str, EngineRequest] = {}
        self.overtaking: list[Reservation] = []

    @property
    def has_work(self) -> bool:
        """Return whether any item waits, for blocks or for their restore."""
        return bool(self.items or self.fetching or self.overtaking)

    def add(self, item: WaitingItem) -> None:
        """Add an item behind those of its priority."""
        bisect.insort(self.items, item, key=lambda waiting: waiting.request.order)

    def add_reservation(self, reservation: Reservation) -> None:
        """Queue a reservation, or grant it at once.

        A reservation without live choices needs no steps. It overtakes the queue if it takes at
        most half of the available blocks.
        """
        need = self._pool.blocks_for(len(reservation.request.prompt) + 1)
        half = self._reservations.available_blocks // 2
        overtakes = not reservation.request.live_choices and need <= half
        if overtakes and self._awaits_tier(reservation):
            self.overtaking.append(reservation)
        elif not (overtakes and self._reservations.grant(reservation)):
            self.add(reservation)

    def drop(self, reservation: Reservation) -> None:
        """Take a reservation out, wherever it waits, and release its blocks."""
        for waiting in (self.items, self.overtaking):
            if reservation in waiting:
                waiting.remove(reservation)
        self._reservations.drop(reservation)

    def first_ready(self, awaits_prompt: Callable[[TokenSequence], bool]) -> WaitingItem | None:
        """Return the first queued item that waits for no blocks, from a tier or of a prompt."""
        return next(
            (
                item
                for item in self.items[:_MAX_RESTORES]
                if not (isinstance(item, TokenSequence) and awaits_prompt(item))
                and not self._awaits_tier(item)
            ),
            None,
        )

    def fetch(self, request: EngineRequest) -> bool:
        """Start restoring a HELD request's blocks from a tier; False if none is restored."""
        hashes = self._reservations.hashes(request)
        self._bring(request.request_id, hashes, request, always=True)
        if not self._tiers.brings(request.request_id):
            return False
        self.fetching[request.request_id] = request
        return True

    def fetched(self) -> list[EngineRequest]:
        """Return HELD requests whose restore ended; queue reservations whose restore ended."""
        restored = [item for item in self.overtaking if not self._tiers.brings(item)]
        for reservation in restored:
            self.overtaking.remove(reservation)
            self.add_reservation(reservation)
        ready = [name for name in self.fetching if not self._tiers.brings(name)]
        return [self.fetching.pop(name) for name in ready]

    def _awaits_tier(self, item: WaitingItem) -> bool:
        """Return whether leading blocks of a waiting item are being restored from a tier.

        They are requested once, when there is room. Blocks that are then still missing are
        computed.
        """
        request = item.request
        if not item.asked_tiers and request.spec.cacheable:
            if isinstance(item, Reservation):
                hashes = self._reservations.hashes(request)
            elif item.prompt_outputs is None:
                hashes = item.full_hashes(len(item.tokens) - 1, self._pool.block_tokens)
            else:
                hashes = []
            item.asked_tiers = self._bring(item, hashes, request)
        return self._tiers.brings(item)

    def _bring(
        self, key: Hashable, hashes: list[bytes], request: EngineRequest, *, always: bool = False
    ) -> bool:
        promised = self._reservations.reserved_blocks
        owner = request.spec.cache_owner
        return self._tiers.bring(key, hashes, promised, request.tier_tokens, owner, always=always)
