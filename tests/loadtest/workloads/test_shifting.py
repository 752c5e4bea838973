"""The trace with a changing mix, made from a recorded one."""

from statistics import fmean

from loadtest.workloads.shifting import PHASE_S, shifting
from loadtest.workloads.traces import TraceRequest

RECORDED = [TraceRequest(n * 0.5, 1000, 200) for n in range(round(6 * PHASE_S / 0.5))]


def test_phases_are_recorded_long_prompts_and_long_responses():
    shifted = shifting(RECORDED)
    phases = [
        [one for one in shifted if int(one.arrival_s // PHASE_S) == phase] for phase in range(6)
    ]
    for first in (0, 3):
        as_recorded, prompts, responses = phases[first : first + 3]
        assert as_recorded == RECORDED[first * 1200 : (first + 1) * 1200]
        assert 0.40 < len(prompts) / 1200 < 0.50
        assert 2400 < fmean(one.input_tokens for one in prompts) < 2750
        assert 250 < fmean(one.output_tokens for one in prompts) < 340
        assert 0.50 < len(responses) / 1200 < 0.60
        assert {(one.input_tokens, one.output_tokens) for one in responses} == {(1000, 800)}


def test_the_same_seed_gives_the_same_trace():
    assert shifting(RECORDED, 1) == shifting(RECORDED, 1)
    assert shifting(RECORDED, 1) != shifting(RECORDED, 2)
