"""Interface of a backend: a ``ModelRunner`` executes plans over one KV pool.

It is implemented by ``baton/engine/cpu/runner.py``, ``baton/engine/cuda/runner.py`` and
``baton/engine/emulated.py``. Requests that exceed a runner's ``capabilities`` are rejected when
they are submitted.
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
    """Identity and limits of the model behind a runner."""

    numerics_id: str
    weights_digest: bytes
    max_context_tokens: int
    vocab_size: int


class RunnerCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Optional request features that a runner supports.

    Attributes:
        engine: Name of the engine in error messages.
        poolings: Supported ways to pool a prompt's hidden rows to a vector.
    """

    engine: str = "this engine"
    logprobs: bool = True
    logit_bias: bool = True
    bad_words: bool = True
    prompt_logprobs: bool = False
    poolings: tuple[str, ...] = ()
    grammars: bool = False
    adapters: bool = False
    images: bool = False

    def refusal(self, request: RequestSpec) -> BatonError | None:
        """Return the error for a request that the runner cannot serve, or None."""
        params = request.params
        name = self.engine
        if params.grammar and not self.grammars:
            return GrammarError(f"grammars are not served by {name}")
        scored = params.prompt_logprobs is not None
        pooling = request.pooling
        if (scored and not self.prompt_logprobs) or (pooling and pooling not in self.poolings):
            what = "embeddings" if self.prompt_logprobs else "prompt_logprobs and embeddings"
            return InvalidRequestError(f"{what} are not served by {name}")
        if params.logprobs is not None and not self.logprobs:
            return InvalidRequestError(f"logprobs are not served by {name}")
        if params.logit_bias and not self.logit_bias:
            return InvalidRequestError(f"logit_bias is not served by {name}")
        if params.bad_words and not self.bad_words:
            return InvalidRequestError(f"bad_words are not served by {name}")
        if request.adapter and not self.adapters:
            return InvalidRequestError(f"LoRA adapters are not served by {name}")
        if request.images and not self.images:
            return InvalidRequestError(f"images are not served by {name}")
        return None


class GrammarStore(Protocol):
    """Compiled grammars of a runner; thread-safe."""

    def hold(self, grammar: str) -> None:
        """Keep a grammar until ``release`` was called as often."""

    def release(self, grammar: str) -> None:
        """Remove one hold on a grammar."""

    def prepare(self, grammar: str) -> Any:
        """Compile a grammar unless it is compiled; slow, and may raise ``GrammarError``."""


class AdapterStore(Protocol):
    """Loaded LoRA adapters of a runner, by digest."""

    def prepare(self, ref: AdapterRef) -> Any:
        """Read and check an adapter on every rank, in a separate thread.

        Raises:
            AdapterLoadError: The adapter cannot be loaded or has another digest than ``ref``.
        """

    def add(self, ref: AdapterRef, prepared: Any) -> None:
        """Add a prepared adapter; only between steps."""

    def remove(self, digest: str) -> None:
        """Remove an adapter that no row uses; only between steps."""


class ModelRunner(Protocol):
    """Executor of plans over one KV pool."""

    @property
    def capabilities(self) -> RunnerCapabilities:
        """Optional features of requests."""

    @property
    def adapters(self) -> AdapterStore:
        """Store of the adapters that rows name in ``adapter``."""

    @property
    def grammars(self) -> GrammarStore | None:
        """Store of compiled grammars; None if grammars are not supported."""

    @property
    def geometry(self) -> KvGeometry:
        """Shape of the KV pool."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response unless ``ignore_eos``."""

    @property
    def rewritten_rows(self) -> tuple[int, ...]:
        """Rows of the last plan whose KV was rewritten after ``on_layers_done``."""

    @property
    def refused_rows(self) -> Mapping[int, BatonError]:
        """Rows of the last plan whose grammar failed; their samples are void."""

    @property
    def mask_ns(self) -> int:
        """Time that the last step spent on grammars."""

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """Return how many leading ``draft_tokens`` the grammar of ``spec`` allows."""

    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        """Run one step.

        ``on_layers_done`` is called during the step with the number of layers whose KV is in the
        pool, so that KV is sent while later layers compute.

        Returns:
            For each row, one token per entry of ``samples``, in order; fewer after a wrong draft
            token.

        Raises:
            NumericsError: Logits of the rows in ``rows`` contain NaN or Inf.
        """
