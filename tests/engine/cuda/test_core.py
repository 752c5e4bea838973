"""The engine's core over the CUDA runner: the answers of the CPU, with and without draft tokens."""

import itertools

import pytest

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.core.speculative.proposers import NgramProposer, Speculation
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cuda.runner import CudaRunner
from baton.types import events as ev
from baton.types.params import SamplingParams
from tests.engine.core.draft_tokens import FreeDraftTokens
from tests.engine.cuda import tiny

C = tiny.config(layers=1)
ECHO = [5, 9, 11, 5, 9, 11, 5, 9]
REQUESTS = [
    (ECHO, SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)),
    (list(tiny.tokens(19)), SamplingParams(max_tokens=9, temperature=1.2, seed=7, n=2, top_k=4)),
    (ECHO * 2, SamplingParams(max_tokens=12, temperature=0.5, seed=3, frequency_penalty=-2.0)),
]


def answers(
    runner: CudaRunner | CpuRunner, *, draft_token: bool
) -> dict[tuple[str, int], list[int]]:
    speculation = Speculation(NgramProposer(), 4, FreeDraftTokens()) if draft_token else None
    core = EngineCore(runner, SchedulerConfig(4, 24), speculation=speculation)
    for number, (prompt, params) in enumerate(REQUESTS):
        spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=b"s" * 16, ticket=number)
        request = EngineRequest(request_id=f"{number}", prompt=prompt, spec=spec)
        core.scheduler.submit(request, 0)
    found: dict[tuple[str, int], list[int]] = {}
    draft_tokens = 0
    for now_ns in itertools.count():
        plan = core.plan(now_ns)
        if not plan.rows:
            break
        draft_tokens += sum(row.num_draft_tokens for row in plan.rows)
        for event in core.apply(plan, runner.execute(plan), now_ns, 1000):
            core.batch.check_integrity()
            if isinstance(event, ev.Tokens):
                answer = found.setdefault((event.request_id, event.choice), [])
                answer += [drawn.token for drawn in event.tokens]
    assert bool(draft_tokens) is draft_token
    assert core.pool.counts().in_use == 0
    return found


@pytest.mark.slow
def test_requests_have_the_answers_of_the_cpu_whether_guessed_or_not() -> None:
    size = tiny.geometry(C, "fp32").pool_bytes
    expected = answers(tiny.torch_runner(C, "fp32", bytearray(size)), draft_token=False)
    assert [len(answer) for answer in expected.values()].count(0) == 0
    for draft_token in (False, True):
        runner = tiny.cuda_runner(C, "fp32", bytearray(size))
        assert answers(runner, draft_token=draft_token) == expected
