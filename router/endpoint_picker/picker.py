"""Choice of a server for each request of a gateway, by the placement of the router's lanes.

The router does not send these requests. Their load counts from the choice to the end of the
gateway's stream; that of other pickers and clients is in the servers' reports. Prefixes at a server
without KV events are those of the requests that were sent there, corrected by the cached tokens
that its responses report.
"""

from dataclasses import replace
from functools import partial
from time import monotonic_ns

from baton.engine.remote.cached_prefixes import RecentBlocks
from baton.types.errors import UnavailableError
from baton.types.geometry import BLOCK_TOKENS
from baton.wire.compatibility import external_engine
from router.endpoint_picker.gateway_stream import SUBSET, GatewayStream
from router.endpoint_picker.own_load import OwnLoad
from router.endpoint_picker.past_requests import read_request
from router.frontend.off_loop import off_loop
from router.lane import Lane
from router.process import Process
from router.request import GenerationRequest
from router.routing.placement.block_table import HASH_BYTES, each_hash
from router.routing.workers.slot import WorkerSlot


class Picker:
    """Chooses servers for the requests of gateways."""

    def __init__(self, process: Process) -> None:
        self._lanes = process.lanes
        self.own = OwnLoad()
        self._recent: dict[bytes, RecentBlocks] = {}  # by incarnation

    @property
    def is_ready(self) -> bool:
        """True if a server takes requests."""
        return any(lane.gateway.workers.usable for lane in self._lanes)

    async def pick(self, stream: GatewayStream) -> "Picked":
        """Choose a server.

        Raises:
            BatonError: The body is invalid, its model is not served, or no server is ready.
        """
        work = partial(read_request, stream.path, bytes(stream.body), self._lanes)
        lane, request = await off_loop(len(stream.body), work)
        return Picked(self, lane, replace(request, among=_among(lane, stream.subset)))

    def recent_of(self, lane: Lane, slot: WorkerSlot) -> RecentBlocks | None:
        """Return the known blocks of a server that sends no KV events; None for another one."""
        block_tokens = slot.record.unseen_block_tokens
        incarnation = slot.incarnation
        if block_tokens and incarnation not in self._recent:
            present = {each.incarnation for each in self._lanes.slots}
            self._recent = {key: kept for key, kept in self._recent.items() if key in present}
            note = partial(lane.prefix_index.observe, incarnation)
            engine = external_engine(slot.link.capabilities) if slot.link is not None else ""
            self._recent[incarnation] = RecentBlocks(
                slot.record.kv_blocks,
                block_tokens,
                note,
                by_slot=engine.startswith("llama-server "),
            )
        return self._recent.get(incarnation)


class Picked:
    """A request whose server is chosen, until it ends.

    Attributes:
        endpoint: Address and port of the server.

    Raises:
        UnavailableError: No server is ready.
    """

    def __init__(self, picker: Picker, lane: Lane, request: GenerationRequest) -> None:
        placer = lane.gateway.placer
        quote = placer.quote(request)
        slot = lane.gateway.workers.get(quote.placement.decode_id)
        if slot is None or not slot.record.server:
            raise UnavailableError(f"{quote.placement.decode_id} is not an attached server")
        self.endpoint = slot.record.server
        self._request = request
        self._placer = placer
        self._metrics = lane.metrics
        self._computed = False
        self._placement = placer.place(request, quote=quote)
        self._own = picker.own
        self._own.began(slot.worker_id, request.sampling.n)
        lane.gateway.on_report = self._own.leave_out
        self._recent = picker.recent_of(lane, slot)
        if self._recent is not None:
            blocks = max(len(request.prompt) - 1, 0) // BLOCK_TOKENS  # the last token is not cached
            self._hashes = list(each_hash(quote.hashes[: blocks * HASH_BYTES]))
            self._expected = self._recent.expected(self._hashes)
        predicted_s = self._placement.chosen.terms.first_token_s
        self._metrics.inc("baton_routes", mode=request.mode)
        self._metrics.observe("baton_predicted_seconds", predicted_s, mode=request.mode)

    def follow(self, stream: GatewayStream) -> None:
        """Note the begin of the response: the prompt is computed, and its blocks are cached."""
        if self._computed or stream.status != 200 or not stream.tail:
            return
        self._computed = True
        now_ns = monotonic_ns()
        self._placer.computed(self._request.request_id, now_ns)
        mode = self._request.mode
        actual_s = (now_ns - self._placement.placed_ns) / 1e9
        error_s = abs(actual_s - self._placement.chosen.terms.first_token_s)
        self._metrics.observe("baton_actual_seconds", actual_s, mode=mode)
        self._metrics.observe("baton_prediction_error_seconds", error_s, mode=mode)
        if self._recent is not None:
            self._recent.use(self._hashes)

    def end(self, stream: GatewayStream) -> None:
        """Note the end of the stream, and correct what is known by the response's usage."""
        self._placer.release(self._request.request_id)
        worker_id = self._placement.decode_id
        self._own.ended(worker_id, self._request.sampling.n, monotonic_ns())
        cached_tokens, completion_tokens = stream.usage()
        if self._computed and completion_tokens is not None:
            self._placer.learn(self._request, completion_tokens)
        if not self._computed or cached_tokens is None:
            return
        if self._recent is not None:
            self._recent.correct(self._expected, cached_tokens)
        computed_tokens = max(len(self._request.prompt) - cached_tokens, 0)
        self._metrics.inc("baton_prefix_tokens", cached_tokens, source="local")
        self._metrics.inc("baton_prefix_tokens", computed_tokens, source="computed")


def _among(lane: Lane, subset: tuple[str, ...] | None) -> frozenset[str] | None:
    """Return the ids of the usable workers in a subset, of one at least; None if it has all."""
    usable = lane.gateway.workers.usable
    if subset is None or not usable:
        return None
    inside = [
        slot.worker_id
        for slot in usable
        if slot.record.server in subset or slot.record.server.rpartition(":")[0] in subset
    ]
    if not inside:
        raise UnavailableError(f"none of the {len(subset)} endpoints in {SUBSET} is ready")
    return frozenset(inside) if len(inside) < len(usable) else None
