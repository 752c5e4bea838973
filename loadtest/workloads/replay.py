"""Plan from a recorded trace; scaling lengths and gaps preserves shared prefixes."""

from collections.abc import Sequence

import numpy as np

from loadtest.workloads.arrivals import spread_ticks_s
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import UNIQUE_KEYS
from loadtest.workloads.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest


def replay_plan(
    requests: Sequence[TraceRequest],
    *,
    name: str,
    speed: float = 1.0,
    shrink: float = 1.0,
    seed: int = 0,
) -> Plan:
    """Return the plan that replays a trace, with gaps ÷ ``speed`` and lengths ÷ ``shrink``.

    A block hash stands for the same 512 ÷ shrink words wherever it occurs, so that prompts share
    prefixes as in the trace. ``seed`` chooses the words, and arrivals within a recorded tick.

    Raises:
        ValueError: ``speed`` or ``shrink`` is not above 0, or a hash is too large for a key.
    """
    if not speed > 0 or not shrink > 0:
        raise ValueError(f"speed {speed:g} and shrink {shrink:g} must be above 0")
    rng = np.random.default_rng(seed)
    recorded_s = np.array([request.arrival_s for request in requests])
    arrivals_s = spread_ticks_s(rng, recorded_s) / speed
    conversations = tuple(
        Conversation(start_s=float(start_s), turns=(_turn(index, request, shrink),))
        for index, (start_s, request) in enumerate(zip(arrivals_s, requests, strict=True))
    )
    parameters: dict[str, str | int | float] = {"trace": name, "requests": len(requests)}
    parameters |= {"speed": float(speed), "shrink": float(shrink)}
    return Plan(name="replay", seed=seed, conversations=conversations, parameters=parameters)


def _turn(index: int, request: TraceRequest, shrink: float) -> Turn:
    prompt_tokens = max(1, round(request.input_tokens / shrink))
    return Turn(
        index=index,
        prompt=_segments(index, request.block_hashes, prompt_tokens, shrink),
        max_tokens=max(1, round(request.output_tokens / shrink)),
    )


def _segments(
    index: int, hashes: tuple[int, ...], prompt_tokens: int, shrink: float
) -> tuple[Segment, ...]:
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS / shrink))
    segments = []
    left = prompt_tokens
    for block_hash in hashes:
        if not 0 <= block_hash < UNIQUE_KEYS:
            raise ValueError(f"request {index}: hash {block_hash} is not in [0, 2**40)")
        if left <= 0:
            break
        segments.append(Segment(block_hash, min(block_tokens, left)))
        left -= block_tokens
    if left > 0:  # no hashes were recorded, or rounding left a few tokens
        segments.append(Segment(UNIQUE_KEYS + index, left))
    return tuple(segments)
