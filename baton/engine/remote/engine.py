"""Base of engines behind HTTP: live requests, their exchanges, and reports to the shell.

    commands ──▶ RemoteEngine ── one HTTP request per choice ──▶ server
    reports  ◀──  (messages)  ◀── tokens, as they arrive ───────

A subclass is for one kind of server: its paths, bodies and responses.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Coroutine, Sequence
from typing import Any

import numpy as np

from baton.engine.block_names import block_names
from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.engine.remote.cached_prefixes import CachedPrefixes
from baton.engine.remote.http import HttpExchange, HttpOrigin
from baton.engine.remote.live_request import LiveRequest, Parameters
from baton.engine.remote.load import LoadMeter, SequenceProgress
from baton.engine.remote.response import ResponseReader, error_in
from baton.telemetry.tasks import BackgroundTasks
from baton.types import events as ev
from baton.types.errors import BatonError, CancelledError_, InternalError
from baton.types.geometry import TOKEN_BYTES
from baton.types.images import hashed_tokens
from baton.types.params import SampledToken

_SETTLE_S = 0.02
_USAGE_S = 2.0  # from the finish reason to the end of a stream, with the count of cached tokens
_ERROR_BYTES = 1 << 20  # of a response with another status than 200


class RemoteEngine(ABC):
    """Live requests of one server.

    Args:
        send: Sends reports to the shell.
        origin: The server.
        prefixes: Prefixes that it has cached.
        blocks: Number of Baton's blocks in its cache.
        vocab_size: Tokens of the model.

    Attributes:
        broken: Set to the reason if the server can serve no more requests.
        target: Path of requests.
        kind: Name of such servers in errors.
        refused: Codes of errors of a request.
        shares_blocks: Whether a block of several prompts is computed once.
    """

    target = ""
    kind = ""
    refused: Container[object] = ()
    shares_blocks = True

    def __init__(
        self,
        send: Callable[..., None],
        origin: HttpOrigin,
        prefixes: CachedPrefixes,
        blocks: int,
        vocab_size: int,
    ) -> None:
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._send = send
        self._origin = origin
        self._prefixes = prefixes
        self._vocab_size = vocab_size
        self._requests: dict[str, LiveRequest] = {}
        self._meter = LoadMeter(blocks)
        self._settling: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks("remote engine")
        for work, name in prefixes.works():
            self._vital(work, name)

    # ---------------------------------------------------------------- of one kind of server

    @abstractmethod
    def _refusal(self, spec: RequestSpec) -> BatonError | None:
        """Return the error of a request that the server cannot serve, or None."""

    @abstractmethod
    def _body(self, request: LiveRequest, choice: int, parameters: Parameters | None) -> bytes:
        """Return the body that requests one choice."""

    @abstractmethod
    def _reader(self, request: LiveRequest, choice: int) -> ResponseReader:
        """Return the parser of the response for one choice."""

    @abstractmethod
    async def _erase(self) -> bool:
        """Erase the server's whole cache; return whether it did."""

    def _origin_of(self, request: LiveRequest) -> HttpOrigin:
        """Return where a request is sent."""
        return self._origin

    def _error(self, body: bytes, status: int) -> BatonError:
        """Return the error in a response with another status than 200."""
        return error_in(self.kind, body, self.refused, status)

    def _checked(
        self, request: LiveRequest, choice: int, reports: list[ev.Tokens]
    ) -> list[ev.Tokens]:
        """Return the tokens that the server may send.

        Raises:
            InternalError: They are of another model.
        """
        return reports

    def _check_vocabulary(self, tokens: Sequence[SampledToken]) -> None:
        """Raise an error of the server if the model does not have all these tokens."""
        largest = max((sampled.token for sampled in tokens), default=0)
        if largest >= self._vocab_size:
            raise InternalError(
                f"{self._origin.name} sent token {largest}, and the model has "
                f"{self._vocab_size} tokens: it serves another model"
            )

    def _on_lost(self, request: LiveRequest, why: str) -> None:
        """Handle a connection that failed, or a stream that broke off."""
        self._break(why)

    async def _on_failure(self, request: LiveRequest, error: BatonError) -> None:
        """Handle an error of the server."""
        self._end_failed(request, error)

    def _on_end(self, request: LiveRequest) -> None:  # noqa: B027 - most have nothing to do
        """Free what belongs to a request that has ended."""

    def _on_choices_cancelled(  # noqa: B027 - likewise
        self, request: LiveRequest, choices: Sequence[int]
    ) -> None:
        """Handle the end of some choices."""

    def _on_progress(
        self, request: LiveRequest, choice: int, sent: Sequence[messages.Report]
    ) -> None:
        """Send the reports that a response has brought."""
        self._send(*sent)

    # ---------------------------------------------------------------- commands

    def handle(self, command: messages.Command) -> None:
        """Execute a command of the shell, unless it is about Baton's own pool."""
        match command:
            case messages.Submit():
                self._submit(command, messages.malformed(command, self._vocab_size))
            case messages.Cancel():
                self._cancel(command)
            case messages.Release():
                self._end_live(command.request_id, None)
            case messages.EraseBlocks():
                self._tasks.spawn(self._forget(), "forget")

    async def close(self) -> None:
        """Close all connections to the server."""
        if self._settling is not None:
            self._settling.cancel()
        for request in self._requests.values():
            request.end_run()
        await self._tasks.close()
        self._origin.kept.close()
        self._prefixes.close()

    def _submit(self, command: messages.Submit, error: BatonError | None) -> None:
        error = error or self._refusal(command.spec)
        if error is not None:
            self._send(ev.Ended(command.request_id, error.code, error.message))
        else:
            self._start(command)

    def _start(self, command: messages.Submit) -> None:
        request = self._live(command, 0)
        self._requests[command.request_id] = request
        self._begin(request)

    def _live(self, command: messages.Submit, generation: int) -> LiveRequest:
        packed = command.prompt_token_ids
        prompt: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
        if images := command.spec.images:
            packed = np.asarray(hashed_tokens(prompt, images), dtype="<u4").tobytes()
        is_held = command.spec.kind is Kind.HELD  # else the last token is computed
        hashes = block_names(command.spec.hash_seed, packed if is_held else packed[:-TOKEN_BYTES])
        return LiveRequest(command, prompt, generation, hashes)

    def _queue(self, request: LiveRequest) -> None:
        """Count the choices of a request as waiting."""
        cached_tokens = self._prefixes.cached_of(request)
        if not request.is_cached_known:
            request.cached_tokens = cached_tokens
        self._prefixes.sent(request)
        for choice in request.open_choices:
            context = len(request.prompt) + len(request.emitted(choice))
            comes = not request.computes
            row = SequenceProgress(context, cached_tokens, request.submitted_ns, comes)
            row.hashes = request.hashes if self.shares_blocks else ()
            self._meter.submitted(request.submit.request_id, choice, row)
        self._send(self._status())

    def _begin(self, request: LiveRequest) -> None:
        """Send the server the open choices of a request, and count them thereafter."""
        for choice in request.open_choices:
            self._tasks.spawn(self._ask(request, choice), "exchange")
        asyncio.get_running_loop().call_soon(self._count_begun, request, request.run)

    def _ask(self, request: LiveRequest, choice: int) -> Coroutine[Any, Any, None]:
        return self._stream(request, choice)

    def _count_begun(self, request: LiveRequest, run: int) -> None:
        if request.run == run and request.submit.request_id in self._requests:
            self._queue(request)

    def _cancel(self, command: messages.Cancel) -> None:
        request = self._requests.get(command.request_id)
        if request is None:
            return
        for choice in command.choices or tuple(request.open_choices):
            exchange = request.exchanges.get(choice)
            if exchange is not None and choice != request.saving:
                exchange.close()
            self._end_choice(request, choice)
        if not command.choices:
            self._end(request, CancelledError_(command.reason or "cancelled"))
            return
        self._on_choices_cancelled(request, command.choices)
        if not request.open_choices:
            self._end(request, None)

    async def _forget(self) -> None:
        """Erase the whole cache: such servers cannot erase the blocks of one tenant."""
        erased_blocks = self._prefixes.held_blocks
        if await self._erase():
            self._prefixes.erased()
        else:
            erased_blocks = -1
        self._send(messages.BlocksErased({"pool": erased_blocks}))

    # ---------------------------------------------------------------- exchanges

    async def _exchange(
        self, request: LiveRequest, choice: int, body: bytes, take: Callable[[bytes], None]
    ) -> bool:
        """Send the server one request; return whether the response is complete and wanted."""
        run = request.run
        errors = bytearray()
        exchange: HttpExchange | None = None

        def on_body(data: bytes) -> None:
            if exchange is None or exchange.status != 200:
                errors.extend(data)
                if exchange is not None and len(errors) > _ERROR_BYTES:
                    exchange.close()
                return
            take(data)

        async def begun(started: HttpExchange) -> None:
            nonlocal exchange
            exchange = started
            errors.clear()
            if request.run == run and choice in request.open_choices:
                request.exchanges[choice] = started
            else:
                await self._unwanted(request, choice, started)

        try:
            origin = self._origin_of(request)
            ended = await origin.exchange(self.target, body, on_body, begun)
        except OSError as error:
            if self._wants(request, choice, run):
                self._on_lost(request, f"{self._origin.name} takes no requests: {error}")
            return False
        if not self._wants(request, choice, run):
            return False  # its end is handled elsewhere
        if ended.status not in (0, 200):
            await self._on_failure(request, self._error(bytes(errors), ended.status))
            return False
        complete = ended.done.result() or choice in request.sufficed
        if not complete:
            self._on_lost(request, _cut(self._origin.name))
        return complete

    async def _unwanted(self, request: LiveRequest, choice: int, exchange: HttpExchange) -> None:
        """Handle a choice that was cancelled while its exchange began."""
        exchange.close()

    def _wants(self, request: LiveRequest, choice: int, run: int) -> bool:
        return not request.failed and request.run == run and choice in request.open_choices

    async def _stream(
        self, request: LiveRequest, choice: int, parameters: Parameters | None = None
    ) -> None:
        """Request one choice and report its tokens."""
        reader = self._reader(request, choice)
        body = self._body(request, choice, parameters)
        if not await self._exchange(
            request, choice, body, lambda data: self._take(request, choice, reader, data)
        ):
            return
        if not reader.finished and choice not in request.sufficed:
            self._on_lost(request, _cut(self._origin.name))
            return
        self._complete(request, choice, reader)

    def _complete(self, request: LiveRequest, choice: int, reader: ResponseReader) -> None:
        """End a choice that has its finish reason."""
        if reader.cached_tokens is not None and request.computes:
            request.take_cached(reader.cached_tokens)
        self._count_cached(request, choice, reader.cached_tokens)
        if (last := request.last.pop(choice, None)) is not None:
            self._on_progress(request, choice, (request.admission(), last))
        self._end_choice(request, choice)
        if request.computes:
            self._prefixes.responded(request, choice, reader.cached_tokens)
        if not request.open_choices:
            self._end(request, None)

    def _take(self, request: LiveRequest, choice: int, reader: ResponseReader, body: bytes) -> None:
        if not self._wants(request, choice, request.run) or choice in request.sufficed:
            return
        try:
            reports = self._checked(request, choice, reader.feed(body))
        except BatonError as error:
            request.failed = True
            self._tasks.spawn(self._on_failure(request, error), "fail")
            return
        sent: list[messages.Report] = []
        for tokens in reports:
            step = self._count(request, choice, len(tokens.tokens))
            if not request.admitted:
                request.admitted = True
                if request.computes:
                    self._prefixes.computed(request)
                    sent += (request.admission(), self._status())
            if step is not None:
                sent.append(step)
            request.keep(tokens)
            if tokens.finish_reason:
                of = request.submit.request_id, request.run, choice
                asyncio.get_running_loop().call_later(_USAGE_S, self._suffice, *of)
            if tokens.finish_reason and request.computes:
                request.last[choice] = tokens  # the server's count of cached tokens follows
            else:
                sent.append(tokens)
        if sent:
            self._on_progress(request, choice, sent)

    def _suffice(self, request_id: str, run: int, choice: int) -> None:
        """End a choice that has its finish reason, and whose stream the server keeps open."""
        request = self._requests.get(request_id)
        if request is not None and self._wants(request, choice, run):
            request.sufficed.add(choice)
            request.exchanges[choice].close()

    def _count(self, request: LiveRequest, choice: int, tokens: int) -> ev.StepDone | None:
        """Note the arrival of tokens; return the step that it ends, if any."""
        now_ns = time.monotonic_ns()
        if not request.admitted:
            request.first_ns = now_ns
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(_SETTLE_S, self._settle)
        held_blocks = self._prefixes.held_blocks
        return self._meter.tokens(request.submit.request_id, choice, tokens, now_ns, held_blocks)

    def _count_cached(self, request: LiveRequest, choice: int, cached_tokens: int | None) -> None:
        """Note the server's count of cached tokens, and report the prompts that it measures."""
        held_blocks = self._prefixes.held_blocks
        request_id = request.submit.request_id
        step = self._meter.counted(request_id, choice, cached_tokens, held_blocks)
        if step is not None:
            self._send(step)

    def _settle(self) -> None:
        """End a step behind which no more tokens arrive."""
        self._settling = None
        step = self._meter.settled(time.monotonic_ns(), self._prefixes.held_blocks)
        if step is not None:
            self._send(step)
        if self._meter.is_open:
            self._settling = asyncio.get_running_loop().call_later(_SETTLE_S, self._settle)

    def _end_choice(self, request: LiveRequest, choice: int) -> None:
        request.open_choices.discard(choice)
        row = self._meter.ended(request.submit.request_id, choice)
        if row is not None:
            request.input_ns += row.input_ns
            request.output_ns += row.output_ns

    def _end_live(self, request_id: str, error: BatonError | None) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, error)

    def _end_failed(self, request: LiveRequest, error: BatonError) -> None:
        """End a request with an error, unless it has ended meanwhile."""
        if request.submit.request_id in self._requests:
            request.end_run()
            self._end(request, error)

    def _end(self, request: LiveRequest, error: BatonError | None) -> None:
        request_id = request.submit.request_id
        if request.late is not None:
            request.late.cancel()
        for choice in tuple(request.open_choices):
            self._end_choice(request, choice)
        del self._requests[request_id]
        self._prefixes.ended(request)
        self._on_end(request)
        if request.computes:
            self._send(request.admission())
        self._send(self._status(), request.end(error))  # the load behind the end comes with it

    def _status(self) -> ev.StepDone:
        return self._meter.status(self._prefixes.held_blocks)

    def _vital(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.vital(work, name, lambda error: self._break(f"{error}"))

    def _break(self, why: str) -> None:
        if not self.broken.done():
            self.broken.set_result(why)


def _cut(name: str) -> str:
    return f"{name} closed a stream before the end of a response"
