"""Input and output of the planner."""

from collections.abc import Sequence

import msgspec
from batonpb.common_pb2 import WorkerStatus

from baton.registry.types import Role
from baton.types.step_lines import DecodeLine, PromptLine

PREFILL_SHARE = 0.85
"""Share of a prefill worker's time up to which its queue stays short."""

_WARM_STEPS = 64
_LEAST_STEPS = 2


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A ready worker, as the routers place by it.

    Attributes:
        steps: Steps of its engine so far; the first ones are slow.
        prompt_line: Fit of its steps with prompts; zeros if it has none.
        decode_line: Fit of its other steps; zeros if it has none.
        streams: Sequences that it generates.
        queued_tokens: Prompt tokens that wait there.
        max_streams: Limit of sequences that it runs at once.
    """

    worker_id: str
    role: Role
    steps: int
    prompt_line: PromptLine = PromptLine()
    decode_line: DecodeLine = DecodeLine()
    streams: int = 0
    queued_tokens: int = 0
    max_streams: int = 1 << 30


def state_of(worker_id: str, role: Role, report: WorkerStatus, max_streams: int) -> WorkerState:
    """Return the state of a worker from its last load report."""
    token_s = report.prefill_token_s
    if not token_s and report.prefill_tokens_per_s:  # no step was long enough for a line
        token_s = 1 / report.prefill_tokens_per_s
    return WorkerState(
        worker_id=worker_id,
        role=role,
        steps=report.steps,
        prompt_line=PromptLine(token_s, report.prefill_context_s),
        decode_line=DecodeLine(report.decode_base_s, report.decode_row_s, report.decode_context_s),
        streams=report.answering,
        queued_tokens=report.queued_prompt_tokens,
        max_streams=max_streams,
    )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that a decision is based on. Loads and needs are in workers.

    Attributes:
        requests: Requests that the figures are from; older ones count less.
        requests_per_s: Requests that arrive per second.
        prompt_s: Time to compute the uncached part of a prompt.
        miss_share: Uncached part of the time of whole prompts.
        output_tokens: Expected tokens of a response.
        prefill_need: Prefill workers that compute what arrives, at ``PREFILL_SHARE`` of their time.
        decode_need: Decode workers that generate what arrives, at ``DECODE_SHARE`` of the limit.
        prefill_wait_s: Time to compute the prompts that wait, by all prefill workers.
        decode_now: Decode workers that the streams of now fill, at ``DECODE_SHARE`` of the limit.
    """

    prefill: int
    decode: int
    requests: float
    requests_per_s: float
    prompt_s: float
    miss_share: float
    output_tokens: float
    prefill_need: float
    decode_need: float
    prefill_wait_s: float
    decode_now: float

    @property
    def most_decode(self) -> float:
        """Decode workers that both what arrives and the streams of now need."""
        return max(self.decode_need, self.decode_now)


class RoleChange(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    """Decision to give one worker another role."""

    worker_id: str
    role: Role
    reason: str
    figures: Figures


class Resize(msgspec.Struct, frozen=True, kw_only=True, tag="resize"):
    """Decision to change the number of workers of each role."""

    prefill: int
    decode: int
    reason: str
    figures: Figures | None = None

    @property
    def sizes(self) -> dict[Role, int]:
        """Number of workers by role."""
        return {"prefill": self.prefill, "decode": self.decode}


class Nothing(msgspec.Struct, frozen=True, kw_only=True, tag="nothing"):
    """Decision to leave roles and sizes; without figures if there is no load to judge."""

    reason: str
    figures: Figures | None = None


Decision = RoleChange | Resize | Nothing


def usual_prompt_line(workers: Sequence[WorkerState]) -> PromptLine | None:
    """Return the line of the middle worker, of prefill workers if one has measured."""
    measured = _experienced([one for one in workers if one.prompt_line.token_s])
    chosen = [one for one in measured if one.role == "prefill"] or measured
    lines = sorted((one.prompt_line for one in chosen), key=lambda line: line.seconds(1.0, 2048.0))
    return lines[len(lines) // 2] if lines else None


def usual_decode_line(workers: Sequence[WorkerState]) -> DecodeLine | None:
    """Return the line of the middle worker, of decode workers if one has measured."""
    measured = _experienced([one for one in workers if one.decode_line.step_s])
    chosen = [one for one in measured if one.role == "decode"] or measured
    lines = [one.decode_line for one in chosen]
    lines.sort(key=lambda line: line.step_s + 32 * (line.row_s + 2048 * line.context_s))
    return lines[len(lines) // 2] if lines else None


def _experienced(workers: Sequence[WorkerState]) -> Sequence[WorkerState]:
    """Leave out new workers, whose first passes are slow, unless all are new."""
    return [one for one in workers if one.steps >= _WARM_STEPS] or [
        one for one in workers if one.steps >= _LEAST_STEPS
    ]
