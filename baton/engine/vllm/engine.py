"""Translator between the commands of a worker's shell and one running vLLM."""

import asyncio
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from baton.engine.process import messages
from baton.engine.vllm import http, protocol
from baton.engine.vllm.events_client import KvEventsClient
from baton.engine.vllm.load import LoadMeter, Row
from baton.engine.vllm.protocol import ChoiceStream
from baton.engine.vllm.server import VllmFacts
from baton.telemetry.tasks import BackgroundTasks
from baton.types import events as ev
from baton.types.block_hashes import block_hashes
from baton.types.errors import BatonError, CancelledError_, InternalError, UnavailableError

_ALIVE_S = 0.5
_HEALTH_S = 2.0  # for vLLM's API server to respond
_SETTLE_S = 0.02
_DEATH_CHECKS = 3  # of vLLM's health after an internal error


class LiveRequest:
    """Streams of one request, one for each live choice."""

    def __init__(self, submit: messages.Submit, prompt: list[int]) -> None:
        self.submit = submit
        self.prompt = prompt
        self.exchanges: dict[int, http.Exchange] = {}
        self.open_choices: set[int] = set()
        self.submitted_ns = time.monotonic_ns()
        self.admitted = False
        self.failed = False  # vLLM reported an error, which ``VllmEngine`` handles
        self.cached_tokens = 0
        self.first_ns = 0
        self.input_ns = 0
        self.output_ns = 0


class VllmEngine:
    """Live requests of one vLLM.

    Args:
        send: Sends reports to the shell.
        folder: Folder with vLLM's sockets.
        eos: End tokens of the model.
        total_blocks: Baton's blocks in vLLM's pool.

    Attributes:
        broken: Set to the reason if vLLM can serve no more requests.
    """

    def __init__(
        self,
        send: Callable[..., None],
        vllm: asyncio.subprocess.Process,
        folder: str,
        facts: VllmFacts,
        eos: tuple[int, ...],
        total_blocks: int,
    ) -> None:
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._send = send
        self._vllm = vllm
        self._folder = folder
        self._block_tokens = facts.block_tokens
        self._eos = eos
        self._requests: dict[str, LiveRequest] = {}
        self._meter = LoadMeter(total_blocks)
        self._events = KvEventsClient(folder, self._send, _log)
        self._tasks = BackgroundTasks("vllm engine")
        for work, name in (
            (self._events.run(), "kv events"),
            (self._events.fill_gaps(), "kv event gaps"),
            (self._watch_health(), "health"),
            (self._settle(), "steps"),
        ):
            self._tasks.vital(work, name, lambda error: self._break(f"{error}"))

    # ---------------------------------------------------------------- commands

    def handle(self, command: messages.Command) -> None:
        """Execute a command of the shell."""
        match command:
            case messages.Submit():
                self._submit(command)
            case messages.Cancel():
                self._cancel(command)
            case messages.Forget():
                self._tasks.spawn(self._forget(), "forget")
            case _:
                pass  # about hand-offs, which `protocol.refusal` refuses

    async def close(self) -> None:
        """Close all connections to vLLM."""
        await self._tasks.close()

    def _submit(self, command: messages.Submit) -> None:
        error = protocol.refusal(command.spec)
        if error is not None:
            self._send(ev.Ended(command.request_id, error.code, error.message))
            return
        prompt: list[int] = np.frombuffer(command.prompt_token_ids, dtype="<u4").tolist()
        request = LiveRequest(command, prompt)
        self._requests[command.request_id] = request
        emitted = command.spec.emitted
        choices = [n for n in range(command.spec.params.n) if not emitted or emitted[n] is not None]
        request.open_choices.update(choices)
        request.cached_tokens = self._cached_tokens(command, prompt)
        for choice in choices:
            row = Row(
                len(prompt) + len((emitted[choice] if emitted else None) or ()),
                request.cached_tokens,
                request.submitted_ns,
            )
            self._meter.submitted(command.request_id, choice, row)
            self._tasks.spawn(self._stream(request, choice), "stream")
        self._send(self._meter.status(self._cached_blocks))

    def _cached_tokens(self, command: messages.Submit, prompt: list[int]) -> int:
        """Return the prompt tokens that vLLM has cached, by its events; the last is computed."""
        hashes = block_hashes(command.spec.hash_seed, prompt[:-1])
        return self._events.mirror.cached_tokens(hashes, self._block_tokens)

    def _cancel(self, command: messages.Cancel) -> None:
        request = self._requests.get(command.request_id)
        if request is None:
            return
        for choice in command.choices or tuple(request.open_choices):
            exchange = request.exchanges.get(choice)
            if exchange is not None:
                exchange.close()
            self._end_choice(request, choice)
        if not command.choices:
            self._end(request, CancelledError_(command.reason or "cancelled"))
        elif not request.open_choices:
            self._end(request, None)

    async def _forget(self) -> None:
        """Erase the whole cache: vLLM cannot erase the blocks of one tenant."""
        erased = self._cached_blocks
        try:
            target = "/reset_prefix_cache?reset_running_requests=true"
            raw = await http.fetch(self._socket, "POST", target, 30.0)
            success = bool(msgspec.json.decode(raw)["success"])
        except UnavailableError as error:
            _log(error.message)
            success = False
        self._send(messages.Forgotten({"pool": erased if success else -1}))

    # ---------------------------------------------------------------- streams

    async def _stream(self, request: LiveRequest, choice: int) -> None:
        """Request one choice and report its tokens."""
        submit = request.submit
        stream = ChoiceStream(submit.request_id, choice, submit.spec, self._eos)
        errors: list[bytes] = []
        exchange: http.Exchange | None = None

        def on_body(body: bytes) -> None:
            if exchange is None or exchange.status != 200:
                errors.append(body)
                return
            self._take(request, choice, stream, body)

        body = protocol.generate_body(
            submit.request_id, request.prompt, submit.spec, choice, self._eos
        )
        try:
            exchange = await http.begin(
                self._socket, http.request_bytes("POST", protocol.GENERATE, body), on_body
            )
            request.exchanges[choice] = exchange
            if choice not in request.open_choices:  # cancelled meanwhile
                exchange.close()
            complete = await exchange.done
        except OSError as error:
            self._break(f"vLLM takes no requests: {error}")
            return
        if request.failed or choice not in request.open_choices:
            return  # its end is handled elsewhere
        if exchange.status not in (0, 200):
            refused = protocol.read_chunk(b"".join(errors)).error or protocol.ErrorBody()
            await self._fail(request, protocol.error_of(refused, exchange.status))
        elif not complete or not stream.finished:
            self._break("vLLM closed a stream before the end of a response")
        else:
            if stream.cached_tokens is not None:
                request.cached_tokens = stream.cached_tokens
            self._end_choice(request, choice)
            if not request.open_choices:
                self._end(request, None)

    def _take(self, request: LiveRequest, choice: int, stream: ChoiceStream, body: bytes) -> None:
        try:
            reports = stream.feed(body)
        except BatonError as error:
            request.failed = True
            self._tasks.spawn(self._fail(request, error), "fail")
            return
        request_id = request.submit.request_id
        now_ns = time.monotonic_ns()
        sent: list[messages.Report] = []
        for tokens in reports:
            if not request.admitted:
                request.admitted = True
                request.first_ns = now_ns
                sent.append(
                    ev.Admitted(
                        request_id=request_id, cached_tokens=request.cached_tokens, queue_ns=0
                    )
                )
            step = self._meter.tokens(
                request_id, choice, len(tokens.tokens), now_ns, self._cached_blocks
            )
            if step is not None:
                sent.append(step)
            sent.append(tokens)
        self._send(*sent)

    async def _fail(self, request: LiveRequest, error: BatonError) -> None:
        """End a request with vLLM's error, unless vLLM itself is dying."""
        if isinstance(error, InternalError) and await self._is_dying():
            self._break(error.message)
            return
        if request.submit.request_id not in self._requests:
            return
        for exchange in request.exchanges.values():
            exchange.close()
        self._end(request, error)

    async def _is_dying(self) -> bool:
        """Return whether vLLM exits, or reports a dead engine, soon after an internal error."""
        for _ in range(_DEATH_CHECKS):
            if self._vllm.returncode is not None:
                return True
            try:
                await http.fetch(self._socket, "GET", "/health", _HEALTH_S)
            except UnavailableError:
                return True
            await asyncio.sleep(_ALIVE_S)
        return False

    def _end_choice(self, request: LiveRequest, choice: int) -> None:
        request.open_choices.discard(choice)
        row = self._meter.ended(request.submit.request_id, choice)
        if row is not None:
            request.input_ns += row.input_ns
            request.output_ns += row.output_ns

    def _end(self, request: LiveRequest, error: BatonError | None) -> None:
        request_id = request.submit.request_id
        for choice in tuple(request.open_choices):
            self._end_choice(request, choice)
        del self._requests[request_id]
        prompt_tokens = len(request.prompt)
        cached = min(request.cached_tokens, prompt_tokens)
        self._send(
            ev.Admitted(request_id=request_id, cached_tokens=cached, queue_ns=0),
            ev.Ended(
                request_id,
                error.code if error is not None else "",
                error.message if error is not None else "",
                prefill_ns=max(request.first_ns - request.submitted_ns, 0),
                cached_tokens=cached,
                computed_tokens=prompt_tokens - cached if request.admitted else 0,
                input_ns=request.input_ns,
                output_ns=request.output_ns,
            ),
            self._meter.status(self._cached_blocks),
        )

    # ---------------------------------------------------------------- watching

    async def _watch_health(self) -> None:
        """Send ``Alive`` as long as vLLM's API server responds."""
        while True:
            await asyncio.sleep(_ALIVE_S)
            try:
                await http.fetch(self._socket, "GET", "/health", _HEALTH_S)
            except http.StatusError as error:  # 503: its engine core is dead
                self._break(error.message)
            except UnavailableError as error:
                _log(error.message)
            else:
                self._send(messages.Alive())

    async def _settle(self) -> None:
        while True:
            await asyncio.sleep(_SETTLE_S)
            step = self._meter.settled(time.monotonic_ns(), self._cached_blocks)
            if step is not None:
                self._send(step)

    def _break(self, why: str) -> None:
        if not self.broken.done():
            self.broken.set_result(why)

    @property
    def _socket(self) -> str:
        return f"{self._folder}/http"

    @property
    def _cached_blocks(self) -> int:
        return self._events.mirror.held_blocks


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
