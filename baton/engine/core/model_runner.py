"""What the engine asks of a backend: to execute plans over one KV pool.

``ModelRunner`` is implemented by ``baton/engine/cpu/runner.py``, ``baton/engine/cuda/runner.py``
and ``baton/engine/emulated.py``. What a request may ask of a runner stands in its ``capabilities``;
anything else is refused when the request is submitted, before it waits for anything.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from baton.engine.core.plan import SampleSpec, StepPlan
from baton.engine.core.sequence import RequestSpec
from baton.types.errors import BatonError, GrammarError, InvalidRequestError
from baton.types.geometry import KvGeometry
from baton.types.params import AdapterRef, SampledToken


class ModelInfo(msgspec.Struct, frozen=True):
    """What the shell must know of the model behind a runner."""

    numerics_id: str
    weights_digest: bytes
    max_context_tokens: int


class RunnerCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may ask of a runner beside plain sampling.

    Attributes:
        engine: What the errors call it.
    """

    engine: str = "this engine"
    logprobs: bool = True
    logit_bias: bool = True
    prompt_logprobs: bool = False
    poolings: tuple[str, ...] = ()  # ways to pool a prompt's hidden rows to a vector
    grammars: bool = False
    adapters: bool = False

    def refusal(self, request: RequestSpec) -> BatonError | None:
        """The error that a request ends with because the runner cannot serve it."""
        params = request.params
        name = self.engine
        if params.grammar and not self.grammars:
            return GrammarError(f"{name} takes no grammars")
        scored = params.prompt_logprobs is not None
        pooling = request.pooling
        if (scored and not self.prompt_logprobs) or (pooling and pooling not in self.poolings):
            return InvalidRequestError(f"prompt_logprobs and embeddings are not served by {name}")
        if params.logprobs is not None and not self.logprobs:
            return InvalidRequestError(f"logprobs are not served by {name}")
        if params.logit_bias and not self.logit_bias:
            return InvalidRequestError(f"logit_bias is not served by {name}")
        if params.bad_words and not self.logit_bias:
            return InvalidRequestError(f"bad_words are not served by {name}")
        if request.adapter and not self.adapters:
            return InvalidRequestError(f"LoRA adapters are not served by {name}")
        return None


class GrammarStore(Protocol):
    """The grammars that a runner has compiled. For any thread."""

    def hold(self, grammar: str) -> None:
        """Keep a grammar, compiled now or later, until as many calls of ``release``."""

    def release(self, grammar: str) -> None:
        """One holder less."""

    def prepare(self, grammar: str) -> Any:
        """Compile a grammar unless that is done; it may take long.

        Raises:
            GrammarError: It does not compile.
        """


class AdapterStore(Protocol):
    """The adapters that a runner holds, by digest."""

    def prepare(self, ref: AdapterRef) -> Any:
        """Read and check an adapter, on every rank. Slow; called in a thread of its own.

        Raises:
            AdapterLoadError: It cannot be loaded, or is not the one that ``digest`` names.
        """

    def add(self, ref: AdapterRef, prepared: Any) -> None:
        """Hold what ``prepare`` returned; between steps only, and at once."""

    def remove(self, digest: str) -> None:
        """Let an adapter go that no row needs any more; between steps only."""


class ModelRunner(Protocol):
    """Executes plans over one KV pool."""

    @property
    def capabilities(self) -> RunnerCapabilities:
        """What rows may ask for."""

    @property
    def adapters(self) -> AdapterStore:
        """What rows may name in ``adapter``."""

    @property
    def grammars(self) -> GrammarStore | None:
        """Compiles what rows may name in ``params.grammar``; None where there are no grammars."""

    @property
    def geometry(self) -> KvGeometry:
        """Shape of the pool that this runner reads and writes."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer unless ``ignore_eos``."""

    @property
    def rewritten_rows(self) -> tuple[int, ...]:
        """Rows of the last plan whose KV was written a second time after ``on_layers_done``."""

    @property
    def refused_rows(self) -> Mapping[int, BatonError]:
        """Rows of the last plan whose grammar failed, and why: what was sampled there is void."""

    @property
    def mask_ns(self) -> int:
        """Time that the last step spent on grammars."""

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """How many of ``draft_tokens``, in order, the grammar of ``spec`` allows next."""

    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        """Run one step.

        Args:
            plan: What to compute.
            on_layers_done: Called with the number of layers whose KV is in the pool, as the step
                proceeds (this is what streams KV out while later layers still compute).

        Returns:
            For each row of the plan, one token per entry of ``samples``, in order. Behind a wrong
            draft token there may be fewer.

        Raises:
            NumericsError: A row's logits hold NaN or Inf. ``rows`` names the rows at fault.
        """
