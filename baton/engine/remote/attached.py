"""Servers that Baton did not start: their properties, and the policy for their faults.

A started engine is one process with its worker: a fault ends both. An attached server may be behind
a proxy, busy, or about to be replaced. So a fault ends one request, which the router resumes at
another worker. The server is examined at once, and its worker leaves if it is gone or another one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from baton.engine.process import messages
from baton.engine.remote.engine import RemoteEngine
from baton.engine.remote.http import HttpOrigin, RefusedError, StatusError
from baton.engine.remote.live_request import LiveRequest
from baton.engine.remote.others import MissingWatch, ServerLoad, StallWatch
from baton.model.artifact import ModelArtifact
from baton.types import events as ev
from baton.types.errors import BatonError, InternalError, InvalidRequestError, UnavailableError
from baton.types.geometry import KvGeometry

Endpoints = Sequence[tuple[str, str]]
"""ZeroMQ endpoints of KV events, one for each rank, and those that repeat them (may be empty)."""

_MOST_FAILURES = 3  # one after another, without a response between
_POLL_S = 1.0
_ANSWER_S = 5.0
_SILENT_POLLS = 3  # without an answer in time
_IDENTITY_POLLS = 5
_SETTLED_NS = 5_000_000_000  # after which a server counts a request
_MISSING_NS = 10_000_000_000
_MOST_RANKS = 1024
_MOST = 1 << 31  # of all other numbers that a server reports
_LONGEST = 1000  # of its texts, which stand in logs


class UnfitServerError(InternalError):
    """A server lacks what Baton needs; the message names the argument to add."""


def needs_key(origin: HttpOrigin) -> UnfitServerError:
    """Return the error of a server that refuses requests without its key."""
    return UnfitServerError(
        f"{origin.name} refuses Baton's requests: set `key_file` of this server to a file with the "
        "value of its `--api-key`"
    )


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a server that is attached.

    Attributes:
        engine: Kind and version, such as ``vllm/0.32.0``.
        model: Name of the model in requests; ``root`` is the path or id that it was loaded from.
        block_tokens: Tokens of one block of its cache.
        blocks: Number of these blocks; 0: it caches no prefixes.
        ranks: Data-parallel ranks, each with a cache of its own.
        started: Time at which its process has begun; another one is another life of the server.
    """

    engine: str
    model: str
    root: str
    max_context_tokens: int
    block_tokens: int
    blocks: int
    ranks: int = 1
    started: str = ""

    def __post_init__(self) -> None:
        """Refuse what no server has, such as a version with lines for the log."""
        numbers = self.max_context_tokens, self.blocks, self.block_tokens - 1, self.ranks - 1
        texts = self.engine, self.model, self.root, self.started
        are_odd = not all(0 <= one < _MOST for one in numbers) or self.ranks > _MOST_RANKS
        if are_odd or not all(len(one) <= _LONGEST and one.isprintable() for one in texts):
            raise UnfitServerError(f"a server reports odd properties: {repr(self)[:_LONGEST]}")


class EngineDescription(NamedTuple):
    """Properties with which the worker of a server is registered.

    Attributes:
        geometry: Shape of the server's cache.
        hand_off: What two workers must share to hand KV over; empty: they cannot.
    """

    numerics_id: str
    geometry: KvGeometry
    hand_off: str = ""


class ServerKind(Protocol):
    """Servers of one kind with one model.

    Attributes:
        keeps_connections: Whether a server has a place for a connection without a request.
    """

    keeps_connections: ClassVar[bool]

    @property
    def hand_off(self) -> str:
        """Way of KV between the servers; empty: none."""
        return ""

    @property
    def artifact(self) -> ModelArtifact:
        """The model, without its weights."""
        ...

    async def examine(self, origin: HttpOrigin) -> ServerFacts:
        """Return the properties of a server that has all that Baton needs.

        Raises:
            UnavailableError: It does not respond, or is not healthy.
            UnfitServerError: It lacks something.
        """
        ...

    async def past_step(self, origin: HttpOrigin) -> ev.StepDone | None:
        """Return a step at the speed of the prompts that it has computed; None: unknown."""
        return None

    async def events(
        self, origin: HttpOrigin, facts: ServerFacts, named: Endpoints | None
    ) -> Endpoints:
        """Return the endpoints at which its KV events arrive; None: look at the default ports."""
        return ()

    def describe(self, facts: ServerFacts) -> EngineDescription:
        """Return the properties with which its worker is registered."""
        ...

    def engine(
        self,
        send: Callable[..., None],
        origin: HttpOrigin,
        facts: ServerFacts,
        endpoints: Endpoints,
    ) -> "AttachedEngine":
        """Return the engine of a server; ``send`` passes its reports to the shell."""
        ...


class ServerWatch:
    """Looks at a server until it is gone, or ``read`` gives other properties than expected."""

    def __init__(
        self, origin: HttpOrigin, read: Callable[[], Awaitable[ServerFacts]], expected: ServerFacts
    ) -> None:
        self._origin = origin
        self._read = read
        self._expected = expected
        self._suspected = asyncio.Event()

    def suspect(self) -> None:
        """Look at once, because a request has failed."""
        self._suspected.set()

    async def watch(self, alive: Callable[[], None], dead: Callable[[str], None]) -> None:
        """Call ``alive`` as long as the server responds; call ``dead`` once with the reason."""
        silent = 0
        polls = 0
        while True:
            asked = await self._until_due()
            polls += 1
            try:
                compares = asked or not polls % _IDENTITY_POLLS
                anew = compares or silent > 0  # a kept connection shows no replaced server
                await self._origin.fetch("GET", "/health", _ANSWER_S, anew=anew)
                alive()
                if compares:
                    self._compare(await self._read())
            except (StatusError, RefusedError, InternalError) as error:
                dead(error.message)
                return
            except UnavailableError as error:
                silent += 1
                if silent >= _SILENT_POLLS:
                    dead(error.message)
                    return
            else:
                silent = 0
                alive()

    async def _until_due(self) -> bool:
        """Wait for the next look; return whether a request has failed."""
        try:
            async with asyncio.timeout(_POLL_S):
                await self._suspected.wait()
        except TimeoutError:
            return False
        self._suspected.clear()
        return True

    def _compare(self, present: ServerFacts) -> None:
        for field in self._expected.__struct_fields__:
            before = getattr(self._expected, field)
            now = getattr(present, field)
            if before != now:
                raise InternalError(
                    f"{self._origin.name} was replaced: {field} was {before!r} and is {now!r}"
                )


class AttachedEngine(RemoteEngine):
    """Policy for faults of a server that Baton did not start."""

    _failures = 0
    _failed_ns = 0  # when the last one was counted
    _watch: ServerWatch

    def _look_after(
        self,
        facts: ServerFacts,
        read_facts: Callable[[], Awaitable[ServerFacts]],
        read_load: Callable[[], Awaitable[ServerLoad]],
    ) -> None:
        """Watch the server, which had these properties, and the load of its other clients."""
        self._watch = ServerWatch(self._origin, read_facts, facts)
        alive = partial(self._send, messages.Alive())
        self._vital(self._watch.watch(alive, self._break), "health")
        self._vital(self._follow_others(read_load), "load of others")

    async def _follow_others(self, read: Callable[[], Awaitable[ServerLoad]]) -> None:
        """Report the load of the server's other clients, and notice what never ends."""
        stall = StallWatch()
        missing = MissingWatch()
        while True:
            await asyncio.sleep(_POLL_S)
            own = self._meter.sequences
            asked_ns = time.monotonic_ns()
            settled = self._meter.computed_since(asked_ns - _SETTLED_NS)
            try:
                load = await read()
            except BatonError:
                continue  # `ServerWatch` judges the server
            most = max(own, self._meter.sequences)
            if self._meter.others.observe(load, most):
                self._send(self._status())
            if stall.observe(load, most, self._meter.generated):
                self._break(f"{self._origin.name} is healthy, but computes nothing")
            settled = min(settled, self._meter.computed_since(asked_ns - _SETTLED_NS))
            number = missing.observe(load, settled)
            silent = self._meter.silent_since(asked_ns - _MISSING_NS)
            if 0 < len(silent) <= number:  # else some of them are computed
                self._end_missing(silent)

    def _end_missing(self, request_ids: Sequence[str]) -> None:
        """End requests that the server does not have, so that others resume them."""
        why = f"{self._origin.name} works for fewer requests than it got: a proxy may hold this one"
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._end_failed(request, UnavailableError(why))

    def _checked(
        self, request: LiveRequest, choice: int, reports: list[ev.Tokens]
    ) -> list[ev.Tokens]:
        """Return the tokens up to the number that the server was asked for."""
        most = request.spec.params.max_tokens
        checked: list[ev.Tokens] = []
        for run in reports:
            self._check_vocabulary(run.tokens)
            room = most - run.index
            is_too_long = len(run.tokens) + (not run.finish_reason) > room
            checked.append(_cut_at(run, room) if is_too_long else run)
            if is_too_long:  # it should have ended here
                request.sufficed.add(choice)
                request.exchanges[choice].close()
                break
        return checked

    def _recovers(self, request: LiveRequest, why: str) -> bool:
        """Return whether the request continues here in another way."""
        return False

    def _on_lost(self, request: LiveRequest, why: str) -> None:
        self._watch.suspect()
        if self._recovers(request, why):
            return
        if request.submitted_ns > self._failed_ns:  # else the same fault may have cut its stream
            self._failures += 1
            self._failed_ns = time.monotonic_ns()
        self._end_failed(request, UnavailableError(why))
        if self._failures >= _MOST_FAILURES:
            self._break(f"{self._failures} requests in a row failed, the last: {why}")

    async def _on_failure(self, request: LiveRequest, error: BatonError) -> None:
        if isinstance(error, InvalidRequestError):
            self._end_failed(request, error)
        else:
            self._on_lost(request, error.message)

    def _on_end(self, request: LiveRequest) -> None:
        if request.admitted:
            self._failures = 0
        super()._on_end(request)

    def _break(self, why: str) -> None:
        super()._break(why)
        for request in list(self._requests.values()):
            self._end_failed(request, UnavailableError(why))


def _cut_at(run: ev.Tokens, tokens: int) -> ev.Tokens:
    cut = run.tokens[:tokens]
    return msgspec.structs.replace(run, tokens=cut, finish_reason="length", stop_token=None)
