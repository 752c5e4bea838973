"""Pulls leading blocks of a prompt from other workers' caches into this worker's cache.

    begin ──▶ reserve pages ──▶ the peer holds and publishes ──▶ pull, verify ──▶ commit ──▶ ended
      └─────────┴── the peer lacks them, is gone, is slow; the request was cancelled ────────▶ ended

Each pull is a hand-off of a prompt of exactly those blocks, whose response has already ended: after
the commit the engine leaves them in the cache, where the waiting request finds them. Sources are
pulled from one after the other, each for the blocks that are still missing, so a failed one leaves
more for the next. The request then runs in any case, and computes what is not in the cache.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator

from batonpb import common_pb2, decode_pb2
from batonpb import prefill_pb2 as pb

from baton.engine.core.sequence import Kind
from baton.engine.process import messages
from baton.types import events as ev
from baton.types.errors import BatonError
from baton.types.geometry import BLOCK_TOKENS, TOKEN_BYTES
from baton.wire.submission import prefix_request_id, submit_from_wire
from baton.wire.tokens import count_tokens, pack_tokens
from decode_worker.handoff import HandoffListener, ReceivedHandoff
from decode_worker.parts import WorkerParts

_LOG = logging.getLogger(__name__)

_BUDGET_TIMES = 4  # the expected duration at the edge's bandwidth
_LOOK_AGAIN_S = 0.1
_BUDGET_S = 2.0  # on top of it: a busy engine reads commands between two steps


class _Link(HandoffListener):
    def __init__(
        self, submission: decode_pb2.Submission, parts: WorkerParts, on_end: Callable[[int], None]
    ) -> None:
        self._submission = submission
        self._blocks = count_tokens(submission.prompt_tokens) // BLOCK_TOKENS
        self._parts = parts
        self._on_end = on_end
        of = f"d/{submission.request_id}/{submission.attempt}"
        self._engine_id = parts.engine.unused_name(of)
        self._handoff = ReceivedHandoff(submission, self._engine_id, parts, self)
        self._budget: asyncio.TimerHandle | None = None
        self._allowed_s = 0.0  # of the wait for credit, on top of the budget
        self._why_not = ""
        self._reported = False

    def begin(self) -> None:
        command = submit_from_wire(self._submission, self._engine_id, Kind.REMOTE)
        self._parts.engine.submit(command, self._on_report)

    def stop(self) -> None:
        self._give_up("abandoned")

    def close(self) -> None:
        self._reported = True
        if self._budget is not None:
            self._budget.cancel()

    def _budget_s(self) -> float:
        """Return the timeout: after it computing is cheaper than waiting."""
        size_bytes = self._blocks * self._parts.pool.geometry.block_bytes
        rate = self._parts.peers.edge(self._submission.prefill.worker_id).bytes_per_s
        return _BUDGET_S + _BUDGET_TIMES * size_bytes / rate

    def _ran_out(self) -> None:
        """Give up, unless credit of this worker was missing: that time does not count."""
        waited_s = self._handoff.credit_wait_s
        more_s = _LOOK_AGAIN_S if math.isinf(waited_s) else waited_s - self._allowed_s
        if more_s <= 0:
            self._give_up("late")
            return
        if not math.isinf(waited_s):
            self._allowed_s = waited_s
        self._budget = asyncio.get_running_loop().call_later(more_s, self._ran_out)

    def _give_up(self, why: str) -> None:
        if not self._reported:
            self._why_not = why
            self._finish(0)
            self._handoff.cancel()

    def _finish(self, tokens: int) -> None:
        if self._reported:
            return
        self._reported = True
        if self._budget is not None:
            self._budget.cancel()
        outcome = self._why_not or "pulled"
        self._parts.metrics.inc("baton_prefix_pulls", outcome=outcome)
        if tokens:
            self._parts.metrics.inc("baton_prefix_tokens", tokens, source="peer")
        self._on_end(tokens)

    def _on_report(self, report: object) -> None:
        if isinstance(report, ev.Reserved) and self._budget is None and not self._reported:
            # Until now it waited in the queue, as the request would have done.
            loop = asyncio.get_running_loop()
            self._budget = loop.call_later(self._budget_s(), self._ran_out)
        if not isinstance(report, ev.Ended):
            self._handoff.on_report(report)
            return
        figures = self._handoff.figures
        if figures is None or report.error_code:
            self._why_not = self._why_not or "refused"
            self._finish(0)
            return
        self._finish((self._blocks - figures.skip_blocks) * BLOCK_TOKENS)

    def on_peer_needed(
        self, failed: decode_pb2.PrefillTarget, error: BatonError, peer_died: bool
    ) -> None:
        _LOG.info("no prefix from worker=%s: %s", failed.worker_id, error.message)
        self._give_up("refused")

    def on_drained(self) -> None:
        self._parts.engine.client.send(messages.Cancel(self._engine_id))


class PrefixPull:
    """Pull of one request: one source after the other, to the last or to ``stop``.

    ``on_end`` is called once, with the number of pulled tokens.
    """

    def __init__(
        self,
        links: Iterable[decode_pb2.Submission],
        parts: WorkerParts,
        on_end: Callable[[int], None],
    ) -> None:
        self._left = iter(links)
        self._parts = parts
        self._on_end = on_end
        self._tokens = 0
        self._link: _Link | None = None

    def begin(self) -> bool:
        """Start the pull from the next source; return False if none is left."""
        submission = next(self._left, None)
        if submission is None:
            return False
        self._link = _Link(submission, self._parts, self._on_link_end)
        self._link.begin()
        return True

    def stop(self) -> None:
        """Stop the pull, whose result is not needed any more."""
        self._left = iter(())
        if self._link is not None:
            self._link.stop()

    def close(self) -> None:
        """Cancel the timers of a worker that exits and whose engine reports nothing more."""
        self._left = iter(())
        if self._link is not None:
            self._link.close()

    def _on_link_end(self, tokens: int) -> None:
        self._tokens += tokens
        if not self.begin():
            self._on_end(self._tokens)


def begin_pull(
    parts: WorkerParts,
    request: decode_pb2.Submission | pb.PrefillStart,
    on_end: Callable[[int], None],
) -> PrefixPull | None:
    """Start the pull that a request names; return None if there is nothing to wait for.

    ``on_end`` is called once with the number of pulled tokens, but never before this returns.
    """
    named = bool(parts.engine.client.ready.hand_off)
    pull = PrefixPull(prefix_links(request, parts.identity.incarnation, named), parts, on_end)
    return pull if pull.begin() else None


def prefix_links(
    request: decode_pb2.Submission | pb.PrefillStart, own: bytes, named_adapter: bool = False
) -> Iterator[decode_pb2.Submission]:
    """Yield the hand-offs for a request's leading blocks; none if it must compute them.

    Requests for outputs of all prompt rows compute all rows, and so do probes. A worker (``own``
    incarnation) does not pull from itself. With ``named_adapter`` the engines find the blocks of an
    adapter by its name, too.
    """
    if request.probe or request.pooling or request.sampling.prompt_logprobs:
        return
    tokens = request.prompt_tokens
    if isinstance(request, decode_pb2.Submission):  # the router names blocks of its longest choice
        live = [choice.token_ids for choice in request.emitted if not choice.finish_reason]
        tokens += max(live, key=len, default=b"")
    block_bytes = TOKEN_BYTES * BLOCK_TOKENS
    for number, source in enumerate((request.prefix, *request.prefix_then)):
        blocks = min(source.blocks, len(tokens) // block_bytes)
        if blocks and source.incarnation != own:
            link = _hand_off(request, source, number, tokens[: blocks * block_bytes])
            if named_adapter and request.HasField("adapter"):
                link.adapter.CopyFrom(request.adapter)
            yield link


def _hand_off(
    request: decode_pb2.Submission | pb.PrefillStart,
    source: common_pb2.PrefixSource,
    number: int,
    tokens: bytes,
) -> decode_pb2.Submission:
    return decode_pb2.Submission(
        request_id=prefix_request_id(request.request_id, number),
        attempt=request.attempt,
        ticket=request.ticket,
        priority=request.priority,
        prompt_tokens=tokens,
        sampling=common_pb2.SamplingParams(n=1, max_tokens=2, logprobs=-1),
        tenant=request.tenant,
        hash_seed=request.hash_seed,
        prefill=decode_pb2.PrefillTarget(
            worker_id=source.worker_id,
            incarnation=source.incarnation,
            address=source.address,
            held_only=True,
            capability=source.capability,
        ),
        traceparent=request.traceparent,
        tracestate=request.tracestate,
        baggage=request.baggage,
        router_id=request.router_id,
        lease_ms=request.lease_ms,
        kv_share=request.kv_share,
        emitted=[decode_pb2.Emitted(token_ids=pack_tokens([0]), finish_reason="stop")],
    )
