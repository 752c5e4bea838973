"""Translator between the commands of a worker's shell and one running vLLM."""

import asyncio
import time
from collections.abc import Callable

import numpy as np

from baton.engine.core.sequence import Kind
from baton.engine.process import messages
from baton.engine.vllm import http, protocol
from baton.engine.vllm.adapters import VllmAdapters
from baton.engine.vllm.control import VllmControl, log
from baton.engine.vllm.events_client import KvEventsClient
from baton.engine.vllm.hand_off import HandOff
from baton.engine.vllm.hand_off_baton import BatonHandOff
from baton.engine.vllm.hand_off_nixl import NixlHandOff
from baton.engine.vllm.live_request import LiveRequest
from baton.engine.vllm.load import LoadMeter, SequenceProgress
from baton.engine.vllm.protocol import ChoiceStream, Parameters
from baton.engine.vllm.server import VllmFacts
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

_SETTLE_S = 0.02
_LOAD_S = 60.0  # for vLLM to load KV from another vLLM, its queue included


class VllmEngine:
    """Live requests of one vLLM.

    Args:
        send: Sends reports to the shell.
        folder: Folder with vLLM's sockets.
        config: Configuration of the model.
        max_adapters: Number of LoRA adapters that are loaded at most; 0: none are served.

    Attributes:
        broken: Set to the reason if vLLM can serve no more requests.
    """

    def __init__(
        self,
        send: Callable[..., None],
        vllm: asyncio.subprocess.Process,
        folder: str,
        facts: VllmFacts,
        config: ModelConfig,
        max_adapters: int = 0,
    ) -> None:
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._send = send
        self._socket = f"{folder}/http"
        self._block_tokens = facts.block_tokens
        self._hands_over = bool(facts.hand_off)
        self._hand_off: HandOff = NixlHandOff(facts.block_tokens)
        if facts.hand_off.startswith("baton/"):
            self._hand_off = BatonHandOff(folder, facts, send)
        self._generation = 0  # of the latest hand-off at this worker
        self._eos = config.eos_token_ids
        self._vocab_size = config.vocab_size
        self._requests: dict[str, LiveRequest] = {}
        self._meter = LoadMeter(facts.pool_blocks)
        self._events = KvEventsClient(folder, send, log)
        self._control = VllmControl(vllm, self._socket)
        self._tasks = BackgroundTasks("vllm engine")
        self._serves_adapters = max_adapters > 0
        self._adapters = VllmAdapters(
            max_adapters, self._socket, config, send, self._start, self._tasks
        )
        for work, name in (
            (self._events.run(), "kv events"),
            (self._events.fill_gaps(), "kv event gaps"),
            (self._control.watch(lambda: send(messages.Alive()), self._break), "health"),
            (self._settle(), "steps"),
        ):
            self._tasks.vital(work, name, lambda error: self._break(f"{error}"))

    def handle(self, command: messages.Command) -> None:
        """Execute a command of the shell, unless it is about Baton's own pool."""
        error = messages.malformed(command, self._vocab_size)
        match command:
            case messages.Submit():
                self._submit(command, error)
            case messages.Cancel():
                self._cancel(command)
            case messages.Commit() | messages.ComputeLocally() if error is not None:
                self._end_live(command.request_id, error)
            case messages.Bind():
                self._bind(command)
            case messages.Commit():
                self._load(command)
            case messages.ComputeLocally():
                self._compute(command)
            case messages.Release():
                # vLLM frees its KV when the other worker has read it
                self._end_live(command.request_id, None)
            case messages.EraseBlocks():
                self._tasks.spawn(self._forget(), "forget")

    async def close(self) -> None:
        """Close all connections to vLLM."""
        self._hand_off.close()
        await self._tasks.close()
        self._events.close()

    def _submit(self, command: messages.Submit, error: BatonError | None) -> None:
        ref = command.spec.adapter
        error = error or protocol.refusal(command.spec, self._hands_over, self._serves_adapters)
        if error is not None:
            self._send(ev.Ended(command.request_id, error.code, error.message))
        elif ref is not None:
            self._adapters.add(command, ref)
        else:
            self._start(command)

    def _start(self, command: messages.Submit) -> None:
        prompt: list[int] = np.frombuffer(command.prompt_token_ids, dtype="<u4").tolist()
        remote = command.spec.kind is Kind.REMOTE
        hands_over = command.spec.kind is not Kind.FULL
        self._generation += hands_over
        request = LiveRequest(command, prompt, self._generation * hands_over)
        for_other = command.spec.kind is Kind.PREFILL and command.spec.params.max_tokens > 1
        if for_other and not self._hand_off.take(request):
            full = UnavailableError("this worker holds KV for other workers and has no more room")
            self._send(ev.Ended(command.request_id, full.code, full.message))
            self._adapters.ended(command.request_id)
            return
        self._requests[command.request_id] = request
        if remote:
            self._queue(request)
            skip_blocks = self._hand_off.skipped_blocks(request)
            self._send(ev.Reserved(command.request_id, request.generation, skip_blocks))
        else:
            self._begin(request)

    def _bind(self, command: messages.Bind) -> None:
        request = self._requests.get(command.request_id)
        if request is not None and request.generation == command.generation:
            self._hand_off.bind(request)

    def _queue(self, request: LiveRequest) -> None:
        """Count the choices of a request as waiting."""
        hashes = block_hashes(request.spec.hash_seed, request.prompt[:-1])  # the last is computed
        request.cached_tokens = self._events.cached.cached_tokens(hashes, self._block_tokens)
        for choice in request.open_choices:
            context = len(request.prompt) + len(request.emitted(choice))
            comes = not request.computes
            row = SequenceProgress(context, request.cached_tokens, request.submitted_ns, comes)
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
            choices = self._hand_off.to_load(request, command.engine_transfer)
        except InternalError as error:
            self._load_failed(request, error.message)
            return
        request.loading.update(request.open_choices)
        request.late = asyncio.get_running_loop().call_later(
            _LOAD_S, self._load_failed, request, f"vLLM loaded no KV within {_LOAD_S:.0f} s"
        )
        for choice in request.open_choices:
            self._tasks.spawn(self._stream(request, choice, choices[choice]), "exchange")

    def _loaded(self, request: LiveRequest) -> None:
        """Report that vLLM has the KV of all choices, and what they have brought so far."""
        if request.late is not None:
            request.late.cancel()
        self._send(ev.Loaded(request.submit.request_id, request.generation), *request.withheld)
        request.withheld.clear()
        self._hand_off.release(request)

    def _load_failed(self, request: LiveRequest, reason: str) -> None:
        """Wait for another load or an order to compute the prompt, or compute it at once."""
        log(f"cannot load KV: request={request.submit.request_id}: {reason}")
        for choice in request.open_choices:
            self._meter.ended(request.submit.request_id, choice)
        if not self._hand_off.repeats:
            self._hand_off.release(request)
            first = [None if tokens is None else tokens[0] for tokens in request.spec.emitted]
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
        self._hand_off.release(request)
        request.begin_run(command.first, Kind.FULL)
        self._begin(request)

    def _cancel(self, command: messages.Cancel) -> None:
        request = self._requests.get(command.request_id)
        if request is None:
            self._adapters.cancel(command)
            return
        for choice in command.choices or tuple(request.open_choices):
            exchange = request.exchanges.get(choice)
            if exchange is not None and choice != request.saving:
                exchange.close()
            self._end_choice(request, choice)
        if not command.choices:
            if request.saving is not None:
                abort = self._control.abort(command.request_id, request.saving)
                self._tasks.spawn(abort, "abort")
            self._end(request, CancelledError_(command.reason or "cancelled"))
            return
        if request.loading:
            request.loading.difference_update(command.choices)
            if not request.loading:  # the other choices have waited for these
                self._loaded(request)
        if not request.open_choices:
            self._end(request, None)

    async def _forget(self) -> None:
        """Erase the whole cache: vLLM cannot erase the blocks of one tenant."""
        erased_blocks = self._cached_blocks
        if not await self._control.erase_cache():
            erased_blocks = -1
        self._send(messages.BlocksErased({"pool": erased_blocks}))

    async def _exchange(
        self, request: LiveRequest, choice: int, body: bytes, take: Callable[[bytes], None]
    ) -> bool:
        """Send vLLM one request; return whether the response is complete and still wanted."""
        run = request.run
        errors: list[bytes] = []
        exchange: http.HttpExchange | None = None

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
                await self._control.abort(request.submit.request_id, choice)
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
        self, request: LiveRequest, choice: int, parameters: Parameters | None = None
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

        The room of a prompt stays until vLLM writes no more into it.
        """
        request_id = request.submit.request_id
        spec = request.spec
        wanted = self._hand_off.to_save(request, choice) if spec.params.max_tokens > 1 else None
        body = protocol.prefill_body(request_id, request.prompt, spec, choice, self._eos, wanted)
        parts: list[bytes] = []
        complete = await self._exchange(request, choice, body, parts.append)
        response = b"".join(parts)
        if wanted is not None:
            await self._hand_off.until_written(request, response)
            if request_id not in self._requests:
                self._hand_off.release(request)
        if not complete or choice not in request.open_choices:
            return
        try:
            answer = protocol.read_chunk(response)
            token = protocol.first_token(answer, spec.params.logprobs)
            held: Parameters = {}
            if wanted is not None:
                held = self._hand_off.held(request, answer.kv_transfer_params)
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
        if len(request.first) == spec.params.n:
            self._prompt_done(request)

    def _prompt_done(self, request: LiveRequest) -> None:
        """Report the first tokens and the parameters with which another vLLM reads the KV."""
        request_id = request.submit.request_id
        computed_ns = sum(self._meter.input_ns(request_id, choice) for choice in request.first)
        done = request.prompt_done(computed_ns, self._hand_off.publish(request))
        self._send(done, self._meter.status(self._cached_blocks))

    async def _fail(self, request: LiveRequest, error: BatonError) -> None:
        """End a request with vLLM's error, unless vLLM itself is dying."""
        if isinstance(error, InternalError) and await self._control.is_dying():
            self._break(error.message)
            return
        if request.submit.request_id not in self._requests:
            return
        if request.loading and not isinstance(error, InvalidRequestError):
            self._load_failed(request, error.message)
            return
        request.end_run()
        self._end(request, error)

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

    def _end(self, request: LiveRequest, error: BatonError | None) -> None:
        request_id = request.submit.request_id
        if request.late is not None:
            request.late.cancel()
        for choice in tuple(request.open_choices):
            self._end_choice(request, choice)
        del self._requests[request_id]
        self._hand_off.release(request)
        self._adapters.ended(request_id)
        if request.computes:
            self._send(request.admission())
        self._send(request.end(error), self._meter.status(self._cached_blocks))

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
    def _cached_blocks(self) -> int:
        return self._events.cached.held_blocks
