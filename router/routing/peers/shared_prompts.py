"""Long prompts that the routers of a lane place, so that they compute a prefix once. Sans-IO.

    own prompt ── announced ─▶ stream ──▶ read back: placed, or waits for one announced before
    of another router ◀──────────┘        recorded until it has ended, or its router is silent

The order of the stream decides between routers that get siblings at once.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from router.request import GenerationRequest
from router.routing.placement.computing_prompts import ComputingPrompt
from router.routing.placement.placer import Placer, Quote

_LONG_S = 0.3  # prompts that take less are not shared: announcing takes some milliseconds
_LEAST_TOKENS = 512  # of a prompt that may be long
_SHARE = 0.1  # longest time of announcing ÷ time that the prompt takes
_MOST_S = 0.25
_OPEN_EVERY_NS = 500_000_000
_SILENT_NS = 2_000_000_000
_MOST_NEWS = 1024  # not written yet
_MOST_HASH_BYTES = 256 * 1024


class PromptNews(msgspec.Struct, frozen=True, array_like=True):
    """State of a prompt of one router.

    Attributes:
        prompt: The prompt; without hashes if the router has sent them before. None: it has ended.
        open: All prompts that have not ended, in an entry without ``request_id``.
    """

    router_id: str
    number: int
    request_id: str = ""
    prompt: ComputingPrompt | None = None
    computed: bool = False
    open: tuple[str, ...] = ()


class SharedPrompts:
    """Prompts of this router for the others, and theirs for the placer of this one.

    Attributes:
        on: Whether the stream is read. Otherwise this router places as if it were alone.
        on_announced: Function that places a request, which is announced now; ``on_news`` writes.
    """

    def __init__(self, placer: Placer, router_id: str) -> None:
        self.on = False
        self.on_announced: Callable[[str], None] = lambda _: None
        self.on_news: Callable[[], None] = lambda: None
        self._placer = placer
        self._router_id = router_id
        self._news: list[PromptNews] = []
        self._number = 0
        self._open: dict[
            str, int
        ] = {}  # own prompts that others know; numbers of what announces them
        self._open_ns = 0  # when these were last sent
        self._others: dict[str, set[str]] = {}  # prompts of other routers
        self._heard_ns: dict[str, int] = {}  # last entry of each
        placer.computing.on_change = self._changed

    def may_announce(self, request: GenerationRequest) -> bool:
        """Return whether the prompt of a request may be long, and could wait for another one."""
        cannot_wait = request.whole_prompt or request.pinned is not None
        return self.on and not cannot_wait and len(request.prompt) >= _LEAST_TOKENS

    def announce(self, request_id: str, quote: Quote) -> float:
        """Announce a prompt before it is placed; return the longest wait, 0 for none."""
        chosen = quote.placement.chosen
        lasts_s = chosen.terms.pull_s + chosen.terms.compute_s
        if lasts_s >= _LONG_S:
            begin, at_ns = self._placer.computing.begin, quote.placement.placed_ns
            begin(request_id, quote.hashes, chosen, at_ns, placed=False)
        return min(_SHARE * lasts_s, _MOST_S) if request_id in self._open else 0.0

    def settle(self, request_id: str) -> None:
        """Remove an announced prompt from the record: it is placed now, or waits."""
        self.on = self.on and not self._open.get(request_id)  # else Redis is late
        self._placer.computing.hide(request_id)

    def _changed(self, request_id: str, prompt: ComputingPrompt | None, computed: bool) -> None:
        """Send the others a prompt that is recorded, has changed, or is None, as it has ended."""
        known = request_id in self._open
        if prompt is None and known:
            del self._open[request_id]
            self._send(request_id, computed=computed)
        elif prompt is not None and self.on and (known or prompt.lasts_s >= _LONG_S):
            self._open[request_id] = 0 if prompt.placed else self._number + 1
            worker = replace(prompt.worker, edges_bytes_per_s={}, sources=())
            hashes = b"" if known else prompt.hashes[:_MOST_HASH_BYTES]
            starts_ns = prompt.starts_ns - self._placer.clock_ns()
            sent = replace(prompt, worker=worker, hashes=hashes, starts_ns=starts_ns)
            self._send(request_id, prompt=sent)

    def _send(self, request_id: str, **more: Any) -> None:
        self._number += 1
        self._news.append(PromptNews(self._router_id, self._number, request_id, **more))
        self.on_news()
        if len(self._news) > _MOST_NEWS:  # Redis does not keep up
            self.stop()

    def take(self) -> list[bytes]:
        """Return the entries to write."""
        news = self._news
        self._news = []
        return [msgspec.msgpack.encode(item) for item in news]

    def apply(self, entry: bytes) -> None:
        """Process the next entry of the stream."""
        try:
            news = msgspec.msgpack.decode(entry, type=PromptNews)
        except msgspec.DecodeError:  # of a router of another version
            return
        router_id = news.router_id
        if router_id == self._router_id:
            if self._open.get(news.request_id) == news.number:
                self._open[news.request_id] = 0
                self.on_announced(news.request_id)
            return
        now_ns = self._heard_ns[router_id] = self._placer.clock_ns()
        key = f"{router_id}/{news.request_id}"
        prompts = self._others.setdefault(router_id, set())
        if news.computed:
            self._placer.computed(key, now_ns)
        if news.prompt is not None and self._record(key, news.prompt, now_ns):
            prompts.add(key)
        else:
            still = {f"{router_id}/{request_id}" for request_id in news.open}
            for gone in {key} if news.request_id else prompts - still:
                prompts.discard(gone)
                self._placer.computing.end(gone)

    def _record(self, key: str, prompt: ComputingPrompt, now_ns: int) -> bool:
        before = self._placer.computing.hide(key)
        prompt.request_id = key
        prompt.hashes = prompt.hashes or (before.hashes if before is not None else b"")
        prompt.starts_ns += now_ns
        prompt.placed = False
        return bool(prompt.hashes) and self._placer.computing.add(prompt)

    def tick(self) -> None:
        """Note that Redis answers, some times a second; forget routers that are silent."""
        self.on = True
        now_ns = self._placer.clock_ns()
        if self._open and now_ns - self._open_ns >= _OPEN_EVERY_NS:
            self._open_ns = now_ns
            self._send("", open=tuple(self._open))
        self._forget_silent(now_ns - _SILENT_NS)

    def stop(self) -> None:
        """Place as if this router were alone: Redis does not answer, or it is alone."""
        self.on = False
        self._news.clear()
        self._open.clear()
        self._forget_silent(self._placer.clock_ns())

    def _forget_silent(self, since_ns: int) -> None:
        for router_id in [name for name, at_ns in self._heard_ns.items() if at_ns <= since_ns]:
            del self._heard_ns[router_id]
            for key in self._others.pop(router_id):
                self._placer.computing.end(key)
