"""Request at an engine behind HTTP: its exchanges, and what they have brought so far."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from baton.engine.core.sequence import Kind
from baton.engine.process import messages
from baton.engine.remote import http
from baton.types import events as ev
from baton.types.errors import BatonError
from baton.types.params import SampledToken

Parameters = dict[str, Any]
"""``kv_transfer_params`` of one choice, as vLLM returns and takes them."""


class Saved(NamedTuple):
    """Pages of a prompt that vLLM has saved.

    Attributes:
        pages: Number of its first pages that are saved in all layers; -1: they cannot be saved.
        end: Number of its first pages that are saved in the first ``layers``; 0: ``pages``.
    """

    pages: int = 0
    end: int = 0
    layers: int = 0
    all_layers: int = 0


def saved_by_all(ranks: Sequence[Saved]) -> Saved:
    """Return the part of the pages beside the complete ones that all ranks have saved."""
    end = min(max(saved.pages, saved.end) for saved in ranks)
    behind = [saved for saved in ranks if saved.pages < end]
    if not behind:
        return Saved()
    return min(behind, key=lambda one: one.layers)._replace(end=end)


class LiveRequest:
    """Exchanges of one request with its engine, one for each live choice.

    Attributes:
        spec: The submitted one; after a hand-off with the first tokens as emitted ones.
        run: Number of the current exchanges; those of earlier runs are ignored.
        generation: Number of the hand-off at this worker; 0: none.
        loading: Choices whose KV is not known to be loaded; ``withheld`` are their reports.
        first: First tokens and parameters of a prompt for another worker, by choice.
        skip_blocks: Leading blocks of the prompt that do not travel: the decode worker has them.
        pages: Page of the worker's pool for each block of the prompt, see ``staging.py``.
        saving: Choice whose vLLM request may write into them; None: none does.
        saved_by_rank: What each rank of vLLM has reported as saved.
        ended_ranks: Ranks that write no more into the pages.
        published_pages: Pages that other workers may read, from the first one on.
        published_part: Further pages that they may read in the first layers.
        hashes: Names of the prompt's whole blocks, without its last token.
        is_cached_known: Whether ``cached_tokens`` is what the server has reported.
        generated: Tokens of the current run, by choice.
        last: Reports with a finish reason, by choice, which wait for the count of cached tokens.
        sufficed: Choices that were ended here, as the server sent more tokens than were asked for.
        expected: Uses of the blocks that were expected to be cached, without KV events.
        rank: Data-parallel rank that it is sent to, of a server that has several.
    """

    def __init__(
        self,
        submit: messages.Submit,
        prompt: list[int],
        generation: int,
        hashes: Sequence[bytes] = (),
    ) -> None:
        self.submit = submit
        self.spec = submit.spec
        self.prompt = prompt
        self.hashes = hashes
        self.generated: dict[int, list[int]] = {}
        self.last: dict[int, ev.Tokens] = {}
        self.sufficed: set[int] = set()
        self.expected: tuple[int, ...] = ()
        self.rank: int | None = None
        self.run = 0
        self.generation = generation
        self.loading: set[int] = set()
        self.withheld: list[messages.Report] = []
        self.late: asyncio.TimerHandle | None = None
        self.first: dict[int, tuple[SampledToken, Parameters]] = {}
        self.skip_blocks = submit.spec.skip_blocks
        self.pages: tuple[int, ...] = ()
        self.saving: int | None = None
        self.saved_by_rank: list[Saved] = []
        self.ended_ranks: set[int] = set()
        self._reported = asyncio.Event()
        self.published_pages = 0
        self.published_part = Saved()
        self.exchanges: dict[int, http.HttpExchange] = {}
        emitted = submit.spec.emitted
        choices = range(submit.spec.params.n)
        self.open_choices = {n for n in choices if not emitted or emitted[n] is not None}
        self.submitted_ns = time.monotonic_ns()
        self.admitted = False
        self.failed = False  # its engine reported an error, which ``RemoteEngine`` handles
        self.cached_tokens = 0
        self.is_cached_known = False
        self.first_ns = 0
        self.input_ns = 0
        self.output_ns = 0

    @property
    def computes(self) -> bool:
        """True if this engine computes the prompt."""
        return self.spec.kind is not Kind.REMOTE

    @property
    def saved_pages(self) -> int:
        """Pages that all ranks of vLLM have saved; -1: one cannot save them."""
        return min((saved.pages for saved in self.saved_by_rank), default=0)

    def report(self, saved: Saved, rank: int) -> None:
        """Note a report of a rank's connector on saved pages."""
        before = self.saved_by_rank[rank]
        if before.pages >= 0:
            is_part = bool(saved.end)
            self.saved_by_rank[rank] = saved._replace(pages=before.pages) if is_part else saved
        self._reported.set()

    async def until_saved(self, pages: int) -> None:
        """Wait until each rank has reported as many pages as saved, or that it cannot save them."""
        while any(0 <= saved.pages < pages for saved in self.saved_by_rank):
            self._reported.clear()
            await self._reported.wait()

    def report_end(self, rank: int) -> None:
        """Note that a rank writes no more into the pages."""
        self.ended_ranks.add(rank)
        self._reported.set()

    async def until_ended(self) -> None:
        """Wait until no rank writes into the pages any more."""
        while len(self.ended_ranks) < len(self.saved_by_rank):
            self._reported.clear()
            await self._reported.wait()

    def begin_run(self, first: Iterable[int | None] | None, kind: Kind) -> None:
        """Start over behind first tokens; None for a choice that has ended."""
        self.end_run()
        emitted = () if first is None else tuple(None if t is None else (t,) for t in first)
        self.spec = msgspec.structs.replace(self.spec, kind=kind, emitted=emitted)
        self.open_choices -= {n for n, tokens in enumerate(emitted) if tokens is None}
        self.submitted_ns = time.monotonic_ns()

    def take_cached(self, tokens: int) -> None:
        """Note the cached tokens that the server reports for a choice.

        Of several choices the first one has computed the prompt, and counts.
        """
        self.cached_tokens = min(self.cached_tokens, tokens) if self.is_cached_known else tokens
        self.is_cached_known = True

    def admission(self) -> ev.Admitted:
        """Return the report that the engine computes the prompt."""
        return ev.Admitted(
            request_id=self.submit.request_id,
            cached_tokens=min(self.cached_tokens, len(self.prompt)),
            queue_ns=0,
            blocks=self.pages if self.spec.kind is Kind.PREFILL else (),
        )

    def emitted(self, choice: int) -> tuple[int, ...]:
        """Return the tokens of a choice that came before the current run."""
        return (self.spec.emitted[choice] if self.spec.emitted else None) or ()

    def keep(self, tokens: ev.Tokens) -> None:
        """Keep the tokens that a response has brought."""
        own = self.generated.setdefault(tokens.choice, [])
        own += [sampled.token for sampled in tokens.tokens]

    def prompt_done(self, computed_ns: int, engine_transfer: bytes) -> ev.PromptDone:
        """Return the report on a prompt for another worker."""
        return ev.PromptDone(
            request_id=self.submit.request_id,
            first=tuple(
                self.first[choice][0]
                for choice in range(self.spec.params.n)
                if self.spec.kind is not Kind.HELD
            ),
            cached_tokens=min(self.cached_tokens, len(self.prompt)),
            queue_ns=0,
            prefill_ns=self.first_ns - self.submitted_ns,
            computed_ns=computed_ns,
            engine_transfer=engine_transfer,
        )

    def end(self, error: BatonError | None) -> ev.Ended:
        """Return the report on the end, by an ``error`` or without one."""
        prompt_tokens = len(self.prompt)
        cached_tokens = min(self.cached_tokens, prompt_tokens)
        has_computed = self.admitted and self.computes
        return ev.Ended(
            self.submit.request_id,
            error.code if error is not None else "",
            error.message if error is not None else "",
            prefill_ns=max(self.first_ns - self.submitted_ns, 0),
            cached_tokens=cached_tokens,
            computed_tokens=prompt_tokens - cached_tokens if has_computed else 0,
            input_ns=self.input_ns,
            output_ns=self.output_ns,
        )

    def end_run(self) -> None:
        """Close all exchanges and discard what they have brought."""
        for exchange in self.exchanges.values():
            exchange.close()
        if self.late is not None:
            self.late.cancel()
        self.exchanges.clear()
        self.generated.clear()
        self.last.clear()
        self.loading.clear()
        self.withheld.clear()
        self.run += 1
        self.admitted = False
        self.failed = False
