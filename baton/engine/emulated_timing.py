"""Linear model of a worker's step time, for emulated workers and the simulator.

    step = a + p * prompt tokens + q * (pairs of a prompt token and one before it)
             + b * responses + c * (context tokens of these responses)

`a` covers reading the weights and starting kernels, `p` the matrix products of a prompt token, `q`
its attention, `b` the other work for one more response, and `c` reading its KV.
"""

from collections.abc import Sequence

import msgspec

from baton.engine.core.plan import PlanRow


class WorkerTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Timing of one kind of worker, in seconds.

    Attributes:
        source: Origin of the figures: measured or assumed.
        kv_bytes_per_token: KV size of the model over all layers.
    """

    name: str
    source: str
    step_s: float  # a
    prompt_token_s: float  # p
    prompt_context_s: float  # q
    answer_s: float  # b
    answer_context_s: float  # c
    kv_bytes_per_token: int

    def seconds(self, rows: Sequence[PlanRow]) -> float:
        """Return the time of one step."""
        total_s = self.step_s if rows else 0.0
        for row in rows:
            count = len(row.tokens)
            if row.decodes:
                total_s += self.answer_s + self.answer_context_s * row.start
            else:
                pairs = count * row.start + count * count / 2
                total_s += self.prompt_token_s * count + self.prompt_context_s * pairs
        return total_s

    def prompt_s(self, tokens: int, cached_tokens: int = 0) -> float:
        """Return the time of a prompt computed alone, without the constant of each step."""
        pairs = (tokens * tokens - cached_tokens * cached_tokens) / 2
        return self.prompt_token_s * (tokens - cached_tokens) + self.prompt_context_s * pairs


H100_70B = WorkerTiming(
    name="h100-70b",
    source="assumed, not measured: a 70B model with 8 KV heads on two H100. Prefill at 6,250 "
    "tokens/s; a step reads 70 GB of fp8 weights at 4.7 TB/s; bf16 KV is read at the same rate",
    step_s=0.015,
    prompt_token_s=1.6e-4,
    prompt_context_s=2.9e-9,
    answer_s=5e-5,
    answer_context_s=7e-8,
    kv_bytes_per_token=327_680,
)

# Fitted to the engine's column of "Beside llama.cpp": prefill 3,062 and 2,201 tokens/s at 512 and
# 2,048 tokens; decode at batch 1 to 32 with contexts of 128 and 1,024 tokens.
EPYC_135M = WorkerTiming(
    name="epyc-135m",
    source="fitted to make bench (docs/measurements/2026-11.md, 2026-11-21): SmolLM2-135M in bf16 "
    "on two cores of an AMD EPYC with avx512_bf16",
    step_s=9.37e-3,
    prompt_token_s=2.84e-4,
    prompt_context_s=1.66e-7,
    answer_s=3.86e-4,
    answer_context_s=1.14e-6,
    kv_bytes_per_token=23_040,
)

_NUMERICS = "emulated/"


def numerics_id_of(timing: str) -> str:
    """Return the numerics id of emulated workers; no real worker has it."""
    return f"{_NUMERICS}{timing}"


def timing_in(numerics_id: str) -> str:
    """Return the timing model in an emulated worker's numerics id; "" for a real worker."""
    return numerics_id.removeprefix(_NUMERICS) if numerics_id.startswith(_NUMERICS) else ""


TIMINGS = {timing.name: timing for timing in (H100_70B, EPYC_135M)}
