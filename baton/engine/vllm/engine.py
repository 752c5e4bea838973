"""Translator between the commands of a worker's shell and one running vLLM."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.engine.remote.cached_prefixes import CachedPrefixes
from baton.engine.remote.engine import RemoteEngine
from baton.engine.remote.http import HttpExchange, HttpOrigin
from baton.engine.remote.live_request import LiveRequest, Parameters
from baton.engine.vllm import images, protocol
from baton.engine.vllm.adapters import VllmAdapters
from baton.engine.vllm.control import VllmControl, log
from baton.engine.vllm.facts import VllmFacts
from baton.engine.vllm.hand_off import HandOff
from baton.engine.vllm.kv_events import MEMORY
from baton.engine.vllm.protocol import ChoiceStream
from baton.engine.vllm.scored_prompt import prompt_logprobs
from baton.model.model_config import ModelConfig
from baton.types import events as ev
from baton.types.errors import BatonError, InternalError, InvalidRequestError, UnavailableError
from baton.types.geometry import BLOCK_TOKENS
from baton.types.pool_counts import TierCounts

_RENDER_S = 30.0  # for the tokens of an image
_LOAD_S = 60.0  # for vLLM to load KV from another vLLM, its queue included


class VllmParts(NamedTuple):
    """Connections to one vLLM: its server, calls beside requests, its cache, its KV."""

    origin: HttpOrigin
    control: VllmControl
    prefixes: CachedPrefixes
    hand_off: HandOff


class VllmEngine(RemoteEngine):
    """Live requests of one vLLM, also those whose KV comes from another one or goes there.

    Args:
        send: Sends reports to the shell.
        parts: Connections to it.
        facts: Its properties.
        config: Configuration of the model.
        max_adapters: Number of LoRA adapters that are loaded at most; 0: none are served.
    """

    target = protocol.GENERATE
    kind = protocol.SERVER
    refused = protocol.REFUSED
    is_attached = False
    """True for a server that Baton did not start."""

    def __init__(
        self,
        send: Callable[..., None],
        parts: VllmParts,
        facts: VllmFacts,
        config: ModelConfig,
        max_adapters: int = 0,
    ) -> None:
        origin = parts.origin
        super().__init__(send, origin, parts.prefixes, facts.pool_blocks, config.vocab_size)
        self._control = parts.control
        self._hands_over = bool(facts.hand_off)
        self._pulls = facts.hand_off.startswith("baton/")
        self._block_tokens = facts.block_tokens
        self._hand_off = parts.hand_off
        self._generation = 0  # of the latest hand-off at this worker
        self._eos = config.eos_token_ids
        self._serves_adapters = max_adapters > 0
        self._adapters = VllmAdapters(max_adapters, origin, config, send, self._start, self._tasks)
        if not self.is_attached:
            self._vital(parts.control.watch(lambda: send(messages.Alive()), self._break), "health")

    def show_tier(self, held: Callable[[], int], blocks: int) -> None:
        """Report the blocks in host memory, which has room for ``blocks``."""
        self._meter.tiers = lambda: (TierCounts(name=MEMORY, places=blocks, held=held()),)

    def _refusal(self, spec: RequestSpec) -> BatonError | None:
        serves = self._hands_over, self._serves_adapters, self._pulls
        return protocol.refusal(spec, *serves, is_attached=self.is_attached)

    def _body(self, request: LiveRequest, choice: int, parameters: Parameters | None) -> bytes:
        request_id = request.submit.request_id
        body = protocol.generate_body(
            request_id, request.prompt, request.spec, choice, self._eos, parameters
        )
        return self._named(body, request.spec)

    def _named(self, body: bytes, spec: RequestSpec | None = None) -> bytes:
        """Return a body with the name of the model, if that may be another one."""
        return body

    def _reader(self, request: LiveRequest, choice: int) -> ChoiceStream:
        stream = ChoiceStream(request.submit.request_id, choice, request.spec, self._eos)
        if request.spec.images:
            stream.prompt = (*request.prompt, *request.emitted(choice))
        return stream

    async def _erase(self) -> bool:
        return await self._control.erase_cache()

    def handle(self, command: messages.Command) -> None:
        """Execute a command of the shell."""
        match command:
            case messages.Commit() | messages.ComputeLocally() if (
                error := messages.malformed(command, self._vocab_size)
            ) is not None:
                self._end_live(command.request_id, error)
            case messages.Bind():
                self._bind(command)
            case messages.Commit():
                self._load(command)
            case messages.ComputeLocally():
                self._compute(command)
            case messages.ExpandImage():
                self._tasks.spawn(self._expand(command), "expand")
            case _:  # after ``Release`` vLLM frees its KV when the other worker has read it
                super().handle(command)

    async def _expand(self, command: messages.ExpandImage) -> None:
        """Report the tokens that stand for an image."""
        name = command.request_id
        body = self._named(images.render_body(command.data))
        try:
            status, _, response = await self._origin.ask("POST", images.RENDER, _RENDER_S, body)
            if status != HTTPStatus.OK:
                raise self._error(response, status)
            self._send(images.expansion_in(response, name))
        except BatonError as error:
            self._send(ev.Ended(name, error.code, error.message))

    async def close(self) -> None:
        """Close all connections to vLLM."""
        self._hand_off.close()
        await super().close()

    def _submit(self, command: messages.Submit, error: BatonError | None) -> None:
        ref = command.spec.adapter
        if error is None and ref is not None and self._refusal(command.spec) is None:
            self._adapters.add(command, ref)
        else:
            super()._submit(command, error)

    def _start(self, command: messages.Submit) -> None:
        kind = command.spec.kind
        remote = kind is Kind.REMOTE
        hands_over = kind is not Kind.FULL
        self._generation += hands_over
        request = self._live(command, self._generation * hands_over)
        for_other = kind in (Kind.PREFILL, Kind.HELD) and command.spec.params.max_tokens > 1
        why = ""
        if kind is Kind.HELD and not self._has_cached(request):
            why = "this worker's vLLM does not have the blocks"
        elif for_other and not self._hand_off.take(request):
            why = "this worker holds KV for other workers and has no more room"
        if why:
            self._send(ev.Ended(command.request_id, UnavailableError.code, why))
            self._adapters.ended(command.request_id)
            return
        self._requests[command.request_id] = request
        if remote:
            self._queue(request)
            request.skip_blocks = request.cached_tokens // BLOCK_TOKENS
            self._send(ev.Reserved(command.request_id, request.generation, request.skip_blocks))
        else:
            self._begin(request)

    def _begin(self, request: LiveRequest) -> None:
        if request.spec.params.prompt_logprobs is None:
            super()._begin(request)
            return
        self._tasks.spawn(self._score(request), "exchange")
        asyncio.get_running_loop().call_soon(self._count_begun, request, request.run)

    async def _score(self, request: LiveRequest) -> None:
        """Report the log-probabilities of a prompt; respond behind its KV, which is cached then.

        vLLM reads no cached prefix for them, and streams none of them.
        """
        prompt = request.prompt
        alternatives = request.spec.params.prompt_logprobs or 0
        name = request.submit.request_id
        body = protocol.one_token_body(name, prompt, request.spec, prompt_logprobs=alternatives)
        body = self._named(body, request.spec)
        parts: list[bytes] = []
        if not await self._exchange(request, min(request.open_choices), body, parts.append):
            return
        reading = asyncio.to_thread(prompt_logprobs, b"".join(parts), prompt, alternatives)
        try:
            scores = await reading
        except InternalError as error:
            await self._on_failure(request, error)
            return
        if name in self._requests:
            request.take_cached(0)
            self._send(ev.PromptOutputsReady(name, scores))
            super()._begin(request)

    def _has_cached(self, request: LiveRequest) -> bool:
        """Return whether vLLM has the whole blocks of a prompt, as far as its KV events show."""
        whole_tokens = len(request.prompt) // self._block_tokens * self._block_tokens
        cached_tokens = self._prefixes.cached_of(request)
        return 0 < whole_tokens <= cached_tokens

    def _bind(self, command: messages.Bind) -> None:
        request = self._requests.get(command.request_id)
        if request is not None and request.generation == command.generation:
            self._hand_off.bind(request)

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
        if self._pulls and not request.open_choices:
            self._tasks.spawn(self._fill(request, choices[0]), "fill")
            return
        request.loading.update(request.open_choices)
        request.late = asyncio.get_running_loop().call_later(
            _LOAD_S, self._load_failed, request, f"vLLM loaded no KV within {_LOAD_S:.0f} s"
        )
        for choice in request.open_choices:
            self._tasks.spawn(self._stream(request, choice, choices[choice]), "exchange")

    async def _fill(self, request: LiveRequest, parameters: Parameters) -> None:
        """Let vLLM load a prefix into its cache, without a response behind it."""
        request_id = request.submit.request_id
        prompt = [*request.prompt, request.prompt[-1]]
        body = protocol.one_token_body(request_id, prompt, request.spec, parameters)
        error: BatonError | None = None
        try:
            body = self._named(body, request.spec)
            await self._origin.fetch("POST", self.target, _LOAD_S, body)
        except UnavailableError as failed:
            log(f"cannot load a prefix: request={request_id}: {failed.message}")
            error = failed
        if request_id in self._requests:
            self._end(request, error)

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
        if request.saving is not None and not command.choices:
            abort = self._control.abort(command.request_id, request.saving)
            self._tasks.spawn(abort, "abort")
        super()._cancel(command)

    def _on_choices_cancelled(self, request: LiveRequest, choices: Sequence[int]) -> None:
        if request.loading:
            request.loading.difference_update(choices)
            if not request.loading:  # the other choices have waited for these
                self._loaded(request)

    def _ask(self, request: LiveRequest, choice: int) -> Coroutine[Any, Any, None]:
        prefills = request.spec.kind in (Kind.PREFILL, Kind.HELD)
        return self._prefill(request, choice) if prefills else super()._ask(request, choice)

    async def _unwanted(self, request: LiveRequest, choice: int, exchange: HttpExchange) -> None:
        if choice == request.saving:
            await self._control.abort(request.submit.request_id, choice)
        else:
            await super()._unwanted(request, choice, exchange)

    def _on_progress(
        self, request: LiveRequest, choice: int, sent: Sequence[messages.Report]
    ) -> None:
        if not request.loading:
            super()._on_progress(request, choice, sent)
            return
        request.withheld += sent
        request.loading.discard(choice)
        if not request.loading:
            self._loaded(request)

    async def _prefill(self, request: LiveRequest, choice: int) -> None:
        """Request the first token of one choice for another worker.

        The room of a prompt stays until vLLM writes no more into it.
        """
        request_id = request.submit.request_id
        spec = request.spec
        wanted = self._hand_off.to_save(request, choice) if spec.params.max_tokens > 1 else None
        if spec.kind is Kind.HELD and wanted is not None:
            prompt = [*request.prompt, request.prompt[-1]]
            body = protocol.one_token_body(request_id, prompt, spec, wanted)
        else:
            of = request.prompt, spec, choice, self._eos, wanted
            body = protocol.prefill_body(request_id, *of)
        body = self._named(body, spec)
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
            self._check_vocabulary([token])
            held: Parameters = {}
            if wanted is not None:
                held = self._hand_off.held(request, answer.kv_transfer_params)
        except InternalError as error:
            await self._on_failure(request, error)
            return
        self._count_cached(request, choice, answer.cached_tokens)
        step = self._count(request, choice, 1)
        if step is not None:
            self._send(step)
        self._meter.row(request_id, choice).held = True
        self._prefixes.computed(request)
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
        self._send(done, self._status())

    async def _on_failure(self, request: LiveRequest, error: BatonError) -> None:
        """End a request with vLLM's error, unless vLLM itself is dying."""
        if isinstance(error, InternalError) and await self._control.is_dying():
            self._break(error.message)
            return
        if request.submit.request_id not in self._requests:
            return
        if request.loading and not isinstance(error, InvalidRequestError):
            self._load_failed(request, error.message)
            return
        await super()._on_failure(request, error)

    def _on_end(self, request: LiveRequest) -> None:
        self._hand_off.release(request)
        self._adapters.ended(request.submit.request_id)
