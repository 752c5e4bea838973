"""Translator between the commands of a worker's shell and one running vLLM."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from baton.engine.core.sequence import Kind
from baton.engine.process import messages
from baton.engine.vllm import http, protocol, transfer
from baton.engine.vllm.adapters import VllmAdapters
from baton.engine.vllm.events_client import KvEventsClient
from baton.engine.vllm.live_request import LiveRequest, Saved
from baton.engine.vllm.load import LoadMeter, Row
from baton.engine.vllm.protocol import ChoiceStream
from baton.engine.vllm.server import GENERATIONS, SAVES, VllmFacts
from baton.engine.vllm.staging import SaveReports, Staging
from baton.model.model_config import ModelConfig
from baton.telemetry.tasks import BackgroundTasks
from baton.types import events as ev
from baton.types.block_hashes import block_hashes
from baton.types.errors import (
    BatonError,
    CancelledError_,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from baton.types.geometry import BLOCK_TOKENS

_ALIVE_S = 0.5
_HEALTH_S = 8.0  # for vLLM's API server to respond, which is slow on busy cores
_SETTLE_S = 0.02
_DEATH_CHECKS = 3  # of vLLM's health after an internal error
_LOAD_S = 60.0  # for vLLM to load KV from another vLLM, its queue included


class VllmEngine:
    """Live requests of one vLLM.

    Args:
        send: Sends reports to the shell.
        folder: Folder with vLLM's sockets.
        eos: End tokens of the model.
        vocab_size: Number of the model's tokens.
        total_blocks: Baton's blocks in vLLM's pool.
        adapters_of: Configuration of the model if it serves LoRA adapters; None: it does not.
        max_adapters: Number of adapters that are loaded at most.

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
        vocab_size: int,
        total_blocks: int,
        adapters_of: ModelConfig | None = None,
        max_adapters: int = 0,
    ) -> None:
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._send = send
        self._vllm = vllm
        self._folder = folder
        self._block_tokens = facts.block_tokens
        self._hands_over = bool(facts.hand_off)
        self._staging: Staging | None = None  # of Baton's own transports
        self._saves: SaveReports | None = None
        if facts.hand_off.startswith("baton/"):
            file = f"{folder}/{GENERATIONS}"
            generations = np.memmap(file, np.int64, "r+", shape=(total_blocks,))
            self._staging = Staging(generations, facts.block_tokens, facts.width)
            self._saves = SaveReports(f"{folder}/{SAVES}", self._saved, self._staging.ended)
        self._generation = 0  # of the latest hand-off at this worker
        self._eos = eos
        self._vocab_size = vocab_size
        self._requests: dict[str, LiveRequest] = {}
        self._meter = LoadMeter(total_blocks)
        self._events = KvEventsClient(folder, self._send, _log)
        self._tasks = BackgroundTasks("vllm engine")
        self._adapters: VllmAdapters | None = None
        if adapters_of is not None and max_adapters:
            self._adapters = VllmAdapters(
                max_adapters, self._socket, adapters_of, send, self._start, self._tasks
            )
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
        error = messages.malformed(command, self._vocab_size)
        match command:
            case messages.Submit():
                self._submit(command, error)
            case messages.Cancel():
                self._cancel(command)
            case messages.Commit() | messages.ComputeLocally() if error is not None:
                if (request := self._requests.get(command.request_id)) is not None:
                    self._end(request, error)
            case messages.Bind():
                self._bind(command)
            case messages.Commit():
                self._load(command)
            case messages.ComputeLocally():
                self._compute(command)
            case messages.Release():
                self._release(command)
            case messages.Forget():
                self._tasks.spawn(self._forget(), "forget")
            case _:
                pass  # about Baton's own pool

    async def close(self) -> None:
        """Close all connections to vLLM."""
        if self._saves is not None:
            self._saves.close()
        await self._tasks.close()

    def _submit(self, command: messages.Submit, error: BatonError | None) -> None:
        ref = command.spec.adapter
        has_adapters = self._adapters is not None
        error = error or protocol.refusal(command.spec, self._hands_over, has_adapters)
        if error is not None:
            self._send(ev.Ended(command.request_id, error.code, error.message))
        elif ref is not None and self._adapters is not None:
            self._adapters.add(command, ref)
        else:
            self._start(command)

    def _start(self, command: messages.Submit) -> None:
        prompt: list[int] = np.frombuffer(command.prompt_token_ids, dtype="<u4").tolist()
        remote = command.spec.kind is Kind.REMOTE
        hands_over = command.spec.kind is not Kind.FULL
        self._generation += hands_over
        request = LiveRequest(command, prompt, self._generation * hands_over)
        if not self._can_hold(request):
            full = UnavailableError("this worker holds KV for other workers and has no more room")
            self._send(ev.Ended(command.request_id, full.code, full.message))
            self._leave_adapter(command.request_id)
            return
        self._requests[command.request_id] = request
        if remote:
            self._queue(request)
            cached_blocks = request.cached_tokens // BLOCK_TOKENS
            skip_blocks = cached_blocks if self._staging is None else 0  # vLLM may evict them
            self._send(ev.Reserved(command.request_id, request.generation, skip_blocks))
        else:
            self._begin(request)

    def _can_hold(self, request: LiveRequest) -> bool:
        """Take the pages of a prompt for another worker; False if there are too few."""
        spec = request.spec
        if self._staging is None or spec.kind is not Kind.PREFILL or spec.params.max_tokens == 1:
            return True
        return self._staging.take(request, min(request.open_choices))

    def _bind(self, command: messages.Bind) -> None:
        request = self._requests.get(command.request_id)
        if request is not None and request.generation == command.generation and self._staging:
            self._send(*self._staging.bind(request))

    def _saved(self, generation: int, saved: Saved, rank: int) -> None:
        """Publish what vLLM has saved of a prompt, while it computes the rest."""
        if self._staging is not None:
            self._send(*self._staging.progressed(generation, saved, rank))

    def _free_pages(self, request: LiveRequest) -> None:
        if self._staging is not None:
            self._send(*self._staging.release(request))

    def _leave_adapter(self, request_id: str) -> None:
        if self._adapters is not None:
            self._adapters.ended(request_id)

    def _queue(self, request: LiveRequest) -> None:
        """Count the choices of a request as waiting."""
        hashes = block_hashes(request.spec.hash_seed, request.prompt[:-1])  # the last is computed
        request.cached_tokens = self._events.mirror.cached_tokens(hashes, self._block_tokens)
        emitted = request.spec.emitted
        for choice in request.open_choices:
            row = Row(
                len(request.prompt) + len((emitted[choice] if emitted else None) or ()),
                request.cached_tokens,
                request.submitted_ns,
                comes=not request.computes,
            )
            self._meter.submitted(request.submit.request_id, choice, row)
        self._send(self._meter.status(self._cached_blocks))

    def _begin(self, request: LiveRequest) -> None:
        """Send vLLM the open choices of a request, and count them thereafter."""
        ask = self._prefill if request.spec.kind is Kind.PREFILL else self._stream
        for choice in request.open_choices:
            self._tasks.spawn(ask(request, choice), "exchange")
        asyncio.get_running_loop().call_soon(self._count_begun, request, request.run)

    def _count_begun(self, request: LiveRequest, run: int) -> None:
        if request.run == run and request.submit.request_id in self._requests:
            self._queue(request)

    def _load(self, command: messages.Commit) -> None:
        """Let vLLM load the KV from another vLLM and decode behind the first tokens."""
        request = self._requests.get(command.request_id)
        if request is None or not request.generation or request.computes:
            return
        request.begin_run(command.first, Kind.REMOTE)
        self._queue(request)
        try:
            choices = self._to_load(request, command.engine_transfer)
        except InternalError as error:
            self._load_failed(request, error.message)
            return
        request.loading.update(request.open_choices)
        request.late = asyncio.get_running_loop().call_later(
            _LOAD_S, self._load_failed, request, f"vLLM loaded no KV within {_LOAD_S:.0f} s"
        )
        for choice in request.open_choices:
            self._tasks.spawn(self._stream(request, choice, choices[choice]), "exchange")

    def _to_load(self, request: LiveRequest, data: bytes) -> list[transfer.Parameters]:
        """Return the parameters with which vLLM loads the KV, by choice."""
        wanted = request.spec.params.n
        if self._staging is not None:
            return [self._staging.to_load(request)] * wanted
        tokens = len(request.prompt)
        found = transfer.decode(data, wanted)
        return [transfer.to_load(one, tokens, self._block_tokens) for one in found]

    def _loaded(self, request: LiveRequest) -> None:
        """Report that vLLM has the KV of all choices, and what they have brought so far."""
        if request.late is not None:
            request.late.cancel()
        self._send(ev.Loaded(request.submit.request_id, request.generation), *request.withheld)
        request.withheld.clear()
        self._free_pages(request)

    def _load_failed(self, request: LiveRequest, reason: str) -> None:
        """Report a failed load, and wait for another one or to compute the prompt here.

        The KV of Baton's own transports is complete by now, so that nothing can be sent again: the
        prompt is computed here.
        """
        _log(f"cannot load KV: request={request.submit.request_id}: {reason}")
        for choice in request.open_choices:
            self._meter.ended(request.submit.request_id, choice)
        if self._staging is not None:
            self._free_pages(request)
            first = [None if one is None else one[0] for one in request.spec.emitted]
            request.begin_run(first, Kind.FULL)
            self._begin(request)
            return
        request.end_run()
        self._queue(request)
        self._send(ev.LoadFailed(request.submit.request_id, request.generation, reason))

    def _compute(self, command: messages.ComputeLocally) -> None:
        """Compute a prompt here whose KV did not come."""
        request = self._requests.get(command.request_id)
        if request is None or not request.generation:
            return
        self._free_pages(request)
        request.begin_run(command.first, Kind.FULL)
        self._begin(request)

    def _release(self, command: messages.Release) -> None:
        """End a prompt for another worker. vLLM frees its KV when that worker has read it."""
        request = self._requests.get(command.request_id)
        if request is not None:
            self._end(request, None)

    def _cancel(self, command: messages.Cancel) -> None:
        request = self._requests.get(command.request_id)
        if request is None:
            if self._adapters is not None:
                self._adapters.cancel(command)
            return
        for choice in command.choices or tuple(request.open_choices):
            exchange = request.exchanges.get(choice)
            if exchange is not None and choice != request.saving:
                exchange.close()
            self._end_choice(request, choice)
        if not command.choices:
            if request.saving is not None:
                self._tasks.spawn(self._abort(request, request.saving), "abort")
            self._end(request, CancelledError_(command.reason or "cancelled"))
            return
        if request.loading:
            request.loading.difference_update(command.choices)
            if not request.loading:  # the other choices have waited for these
                self._loaded(request)
        if not request.open_choices:
            self._end(request, None)

    async def _abort(self, request: LiveRequest, choice: int) -> None:
        """Abort the vLLM request that fills pages, but wait for its response."""
        body = protocol.abort_body(request.submit.request_id, choice)
        with contextlib.suppress(UnavailableError):  # vLLM computes the prompt to its end
            await http.fetch(self._socket, "POST", protocol.ABORT, _HEALTH_S, body)

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

    # ---------------------------------------------------------------- exchanges

    async def _exchange(
        self, request: LiveRequest, choice: int, body: bytes, take: Callable[[bytes], None]
    ) -> bool:
        """Send vLLM one request; return whether the response is complete and still wanted."""
        run = request.run
        errors: list[bytes] = []
        exchange: http.Exchange | None = None

        def on_body(data: bytes) -> None:
            if exchange is None or exchange.status != 200:
                errors.append(data)
                return
            take(data)

        try:
            exchange = await http.begin(
                self._socket, http.request_bytes("POST", protocol.GENERATE, body), on_body
            )
            if request.run == run and choice in request.open_choices:
                request.exchanges[choice] = exchange
            elif choice == request.saving:  # cancelled meanwhile
                await self._abort(request, choice)
            else:
                exchange.close()
            complete = await exchange.done
        except OSError as error:
            self._break(f"vLLM takes no requests: {error}")
            return False
        if request.failed or request.run != run or choice not in request.open_choices:
            return False  # its end is handled elsewhere
        if exchange.status not in (0, 200):
            refused = protocol.read_chunk(b"".join(errors)).error or protocol.ErrorBody()
            await self._fail(request, protocol.error_of(refused, exchange.status))
            return False
        if not complete:
            self._break("vLLM closed a stream before the end of a response")
        return complete

    async def _stream(
        self, request: LiveRequest, choice: int, parameters: transfer.Parameters | None = None
    ) -> None:
        """Request one choice and report its tokens."""
        request_id = request.submit.request_id
        stream = ChoiceStream(request_id, choice, request.spec, self._eos)
        body = protocol.generate_body(
            request_id, request.prompt, request.spec, choice, self._eos, parameters
        )
        if not await self._exchange(
            request, choice, body, lambda data: self._take(request, choice, stream, data)
        ):
            return
        if not stream.finished:
            self._break("vLLM closed a stream before the end of a response")
            return
        if stream.cached_tokens is not None and request.computes:
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
        sent: list[messages.Report] = []
        for tokens in reports:
            step = self._count(request, choice, len(tokens.tokens))
            if not request.admitted:
                request.admitted = True
                if request.computes:
                    sent.append(request.admission())
            if step is not None:
                sent.append(step)
            sent.append(tokens)
        if not request.loading:
            self._send(*sent)
            return
        request.withheld += sent
        if reports:
            request.loading.discard(choice)
        if not request.loading:
            self._loaded(request)

    def _count(self, request: LiveRequest, choice: int, tokens: int) -> ev.StepDone | None:
        """Note the arrival of tokens; return the step that it ends, if any."""
        now_ns = time.monotonic_ns()
        if not request.admitted:
            request.first_ns = now_ns
        return self._meter.tokens(
            request.submit.request_id, choice, tokens, now_ns, self._cached_blocks
        )

    async def _prefill(self, request: LiveRequest, choice: int) -> None:
        """Request the first token of one choice for another worker.

        The pages of a prompt stay until vLLM writes no more into them, which its response proves,
        and the reports of its ranks if the response was aborted.
        """
        request_id = request.submit.request_id
        spec = request.spec
        saves = self._staging is not None and choice == request.saving
        body = protocol.prefill_body(
            request_id, request.prompt, spec, choice, self._eos, self._to_hold(request, choice)
        )
        parts: list[bytes] = []
        complete = await self._exchange(request, choice, body, parts.append)
        if saves and self._staging is not None:
            response = b"".join(parts)
            if protocol.is_aborted(response):
                await request.until_ended()
            else:
                await request.until_saved(protocol.saving_pages(response))
            self._staging.saved(request)
            if request_id not in self._requests:
                self._free_pages(request)
        if not complete or choice not in request.open_choices:
            return
        params = spec.params
        try:
            answer = protocol.read_chunk(b"".join(parts))
            token = protocol.first_token(answer, params.logprobs)
            held: transfer.Parameters = {}
            if self._staging is not None and saves:
                self._staging.check_saved(request, answer.kv_transfer_params)
            elif self._staging is None and params.max_tokens > 1:
                held = transfer.held(answer.kv_transfer_params, len(request.prompt))
        except InternalError as error:
            await self._fail(request, error)
            return
        step = self._count(request, choice, 1)
        if step is not None:
            self._send(step)
        self._meter.row(request_id, choice).held = True
        request.admitted = True
        request.first[choice] = (token, held)
        if answer.cached_tokens is not None:
            request.cached_tokens = answer.cached_tokens
        if len(request.first) == params.n:
            self._prompt_done(request)

    def _to_hold(self, request: LiveRequest, choice: int) -> transfer.Parameters | None:
        """Return the parameters with which vLLM keeps the KV of a prompt; None if it need not."""
        if request.spec.params.max_tokens == 1:
            return None
        if self._staging is None:
            return {"do_remote_decode": True}
        return self._staging.to_save(request) if choice == request.saving else None

    def _prompt_done(self, request: LiveRequest) -> None:
        """Report the first tokens and the parameters with which another vLLM reads the KV."""
        request_id = request.submit.request_id
        by_choice = [request.first[choice] for choice in range(request.spec.params.n)]
        parameters = [held for _, held in by_choice]
        if self._staging is not None and request.pages:
            self._send(*self._staging.published(request))
        self._send(
            ev.PromptDone(
                request_id=request_id,
                first=tuple(token for token, _ in by_choice),
                cached_tokens=min(request.cached_tokens, len(request.prompt)),
                queue_ns=0,
                prefill_ns=request.first_ns - request.submitted_ns,
                computed_ns=sum(self._meter.input_ns(request_id, n) for n in request.first),
                engine_transfer=transfer.encode(parameters) if all(parameters) else b"",
            ),
            self._meter.status(self._cached_blocks),
        )

    async def _fail(self, request: LiveRequest, error: BatonError) -> None:
        """End a request with vLLM's error, unless vLLM itself is dying."""
        if isinstance(error, InternalError) and await self._is_dying():
            self._break(error.message)
            return
        if request.submit.request_id not in self._requests:
            return
        if request.loading and not isinstance(error, InvalidRequestError):
            self._load_failed(request, error.message)
            return
        request.end_run()
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
        if request.late is not None:
            request.late.cancel()
        for choice in tuple(request.open_choices):
            self._end_choice(request, choice)
        del self._requests[request_id]
        self._free_pages(request)
        self._leave_adapter(request_id)
        prompt_tokens = len(request.prompt)
        cached = min(request.cached_tokens, prompt_tokens)
        computed_tokens = prompt_tokens - cached if request.admitted and request.computes else 0
        if request.computes:
            self._send(request.admission())
        self._send(
            ev.Ended(
                request_id,
                error.code if error is not None else "",
                error.message if error is not None else "",
                prefill_ns=max(request.first_ns - request.submitted_ns, 0),
                cached_tokens=cached,
                computed_tokens=computed_tokens,
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
