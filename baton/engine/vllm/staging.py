"""Pages in which KV lies between vLLM and other workers (``hand_off: baton``).

    prefill    take ──▶ vLLM saves blocks, step by step ──▶ published, pulled ──▶ release
    decode     bind ──▶ pulled and verified ──▶ vLLM loads them ──▶ release

A source of a prefix does what a prefill worker does, and the worker that pulls it what a decode
worker does. Their vLLMs compute one token behind the blocks.

The pages are the worker's KV pool, a file with holes: the lowest pages are taken first, so that
memory is used for the most pages that were in use at once. vLLM moves whole blocks only; the pages
of the tokens behind them travel unused, and the decode worker's vLLM computes these tokens.

Leading blocks that the decode worker's vLLM has cached have no pages: they do not travel. If it has
evicted one when it loads the others, it loads none and computes the prompt.

vLLM's connector (``inside/baton_kv.py``) reports saved pages. On CPUs a prompt is saved when vLLM
responds, and reports may be lost. On GPUs vLLM may save pages after its response, which has their
number. No report is lost then, and the last one completes the prompt. A failed save is reported as
-1 pages. Each rank of vLLM reports its own part of the pages, and that it writes no more into them
after the end of a prompt. Pages of a cancelled prompt, which vLLM aborts, are free after that.

An engine step saves its pages in groups of layers. What all ranks have saved is published: pages in
all layers, and those of the current step in the first layers.
"""

import heapq
from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.core.sequence import Kind, blocks_for
from baton.engine.remote.live_request import LiveRequest, Parameters, Saved, saved_by_all
from baton.types import events as ev
from baton.types.errors import InternalError
from baton.types.geometry import BLOCK_TOKENS


class Staging:
    """Pages of the requests of one vLLM, without I/O.

    Args:
        generations: Generation of the hand-off to which each page belongs, one for each page of
            the pool; 0: none. vLLM reads them.
        block_tokens: Tokens of a block of vLLM.
        ranks: Ranks of vLLM, each of which saves a part of every page.
    """

    def __init__(self, generations: NDArray[np.int64], block_tokens: int, ranks: int = 1) -> None:
        self._generations = generations
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._free = list(range(len(generations)))
        self._waiting: deque[LiveRequest] = deque()
        self._filling: dict[int, LiveRequest] = {}  # by generation
        self._saving: dict[int, LiveRequest] = {}  # into whose pages vLLM may write

    def take(self, request: LiveRequest, choice: int) -> bool:
        """Give a prompt its pages, which vLLM fills with the request of ``choice``."""
        if not self._give(request):
            return False
        self._filling[request.generation] = request
        self._saving[request.generation] = request
        request.saving = choice
        request.saved_by_rank = [Saved()] * self._ranks
        return True

    def bind(self, request: LiveRequest) -> list[ev.Bound]:
        """Give a reservation its pages, or let it wait for them; report those that have theirs."""
        self._waiting.append(request)
        return self._grant()

    def saved(self, request: LiveRequest) -> None:
        """Note that vLLM writes no more into the pages of a request."""
        self._saving.pop(request.generation, None)
        request.saving = None

    def ended(self, generation: int, rank: int) -> None:
        """Note that a rank of vLLM writes no more into the pages of a prompt."""
        request = self._saving.get(generation)
        if request is not None:
            request.report_end(rank)

    def release(self, request: LiveRequest) -> list[ev.Bound]:
        """Free the pages of a request, unless vLLM may write into them.

        Returns:
            Reports of the reservations that have waited for them.
        """
        self._filling.pop(request.generation, None)
        if request in self._waiting:
            self._waiting.remove(request)
        if request.saving is None:
            own = request.pages[self._first(request) :]
            self._generations[[*own]] = 0
            for page in own:
                heapq.heappush(self._free, page)
            request.pages = ()
        return self._grant()

    def to_save(self, request: LiveRequest) -> Parameters:
        """Return vLLM's parameters for the request that fills the pages."""
        return {"save_pages": self._moved(request), **self._place(request)}

    def to_load(self, request: LiveRequest) -> Parameters:
        """Return vLLM's parameters for a request that loads the pages."""
        return {"load_pages": self._moved(request), **self._place(request)}

    def check_saved(self, request: LiveRequest, returned: Parameters | None) -> None:
        """Check what vLLM returned for a prompt that it had to save.

        Raises:
            InternalError: It did not save it.
        """
        if request.saved_pages < 0:
            raise InternalError("vLLM cannot save the KV of a prompt; see the worker's engine log")
        if not self._moved(request):
            return
        tokens = (returned or {}).get("saved_tokens")
        wanted = len(request.prompt) + (request.spec.kind is Kind.HELD)
        if tokens != wanted:
            raise InternalError(f"vLLM saved {tokens} of {wanted} prompt tokens")

    def progressed(
        self, generation: int, saved: Saved, rank: int
    ) -> list[ev.Admitted | ev.Published]:
        """Return the reports for what a rank has saved of a prompt.

        Pages that another rank has not saved yet are not published. A report about a prompt that
        has ended publishes nothing.
        """
        request = self._saving.get(generation) or self._filling.get(generation)
        if request is None:
            return []
        request.report(saved, rank)
        if generation not in self._filling or request.saved_pages < 0:
            return []
        return [
            *self._publish(request, request.saved_pages),
            *self._publish_layers(request, saved_by_all(request.saved_by_rank)),
        ]

    def published(self, request: LiveRequest) -> list[ev.Admitted | ev.Published]:
        """Return the reports that all pages of a prompt can be read."""
        return self._publish(request, len(request.pages))

    def _publish(self, request: LiveRequest, end: int) -> list[ev.Admitted | ev.Published]:
        """Return the reports that the pages before ``end`` can be read, but for earlier ones."""
        begin = request.published_pages
        if end <= begin:
            return []
        part = request.published_part
        rectangles = [
            _rectangle(request, range(part.layers, part.all_layers), begin, part.end),
            _rectangle(request, None, max(begin, part.end), end),
        ]
        reports = self._reports(request, rectangles)
        request.published_pages = end
        request.published_part = Saved()
        return reports

    def _publish_layers(
        self, request: LiveRequest, saved: Saved
    ) -> list[ev.Admitted | ev.Published]:
        """Return the reports that more layers of the step's pages can be read."""
        part = request.published_part
        if saved.end <= request.published_pages or saved.layers <= part.layers:
            return []
        if part.end not in (0, saved.end):  # a report was lost: wait until all layers are saved
            return []
        layers = range(part.layers, saved.layers)
        rectangle = _rectangle(request, layers, request.published_pages, saved.end)
        reports = self._reports(request, [rectangle])
        request.published_part = saved
        return reports

    def _reports(
        self, request: LiveRequest, rectangles: Iterable[ev.Published | None]
    ) -> list[ev.Admitted | ev.Published]:
        """Return the reports for rectangles, with that of the admission before the first one."""
        reports: list[ev.Admitted | ev.Published] = [
            rectangle for rectangle in rectangles if rectangle is not None
        ]
        if not request.published_pages and not request.published_part.end:
            admitted = msgspec.structs.replace(request.admission(), blocks=request.pages)
            reports.insert(0, admitted)
        return reports

    def _moved(self, request: LiveRequest) -> tuple[int, ...]:
        """Return the pages of the whole blocks of vLLM that a prompt fills and that travel."""
        tokens = len(request.prompt) // self._block_tokens * self._block_tokens
        return request.pages[self._first(request) : tokens // BLOCK_TOKENS]

    def _place(self, request: LiveRequest) -> Parameters:
        first_token = self._first(request) * BLOCK_TOKENS
        return {"first_token": first_token, "generation": request.generation}

    def _first(self, request: LiveRequest) -> int:
        """Return the first block of a prompt with a page of its own, the first of a vLLM block."""
        last = max(blocks_for(len(request.prompt)) - 1, 0)
        first = min(request.skip_blocks, last)
        return first - first % (self._block_tokens // BLOCK_TOKENS)

    def _grant(self) -> list[ev.Bound]:
        granted: list[ev.Bound] = []
        while self._waiting and self._give(self._waiting[0]):
            request = self._waiting.popleft()
            name = request.submit.request_id
            granted.append(ev.Bound(name, request.generation, request.pages))
        return granted

    def _give(self, request: LiveRequest) -> bool:
        first = self._first(request)
        count = blocks_for(len(request.prompt)) - first
        if count > len(self._free):
            return False
        own = tuple(heapq.heappop(self._free) for _ in range(count))
        self._generations[[*own]] = request.generation
        request.pages = own[:1] * first + own  # nothing is read or written for skipped blocks
        return True


def _rectangle(
    request: LiveRequest, layers: range | None, begin: int, end: int
) -> ev.Published | None:
    """Return the report on pages from ``begin`` to ``end`` in some layers, or None if it is empty.

    None for ``layers`` stands for all layers.
    """
    begin = max(begin, request.skip_blocks)
    if end <= begin or (layers is not None and not layers):
        return None
    return ev.Published(
        request_id=request.submit.request_id,
        layer_begin=0 if layers is None else layers.start,
        layer_count=ev.ALL_LAYERS if layers is None else len(layers),
        block_begin=begin,
        block_count=end - begin,
        valid_tokens=min(end * BLOCK_TOKENS, len(request.prompt)) - begin * BLOCK_TOKENS,
    )
