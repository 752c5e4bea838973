"""A draft model over the emulated engine: it follows the answer, and holds only what it may."""

import pytest

from baton.engine.core.speculative.draft_proposer import DraftProposer
from baton.engine.core.speculative.proposers import Speculation
from baton.engine.emulated import EmulatedRunner
from baton.types.errors import NumericsError
from baton.types.geometry import KvGeometry
from tests.engine.core.draft_tokens import FreeDraftTokens
from tests.engine.core.test_scheduler import answers, golden, request, run
from tests.engine.core.test_speculation import PROMPT, make_core


class Draft:
    """A core whose model drafts for itself, or whose draft differs from it in every draw."""

    def __init__(self, *, good: bool = True, draft_blocks: int = 64, **fields) -> None:
        dim = 4 if good else 8  # other KV bytes, other draws
        geometry = KvGeometry(
            num_layers=2, num_kv_heads=2, head_dim=dim, num_blocks=draft_blocks, dtype="bf16"
        )
        self.runner = EmulatedRunner(geometry, bytearray(geometry.pool_bytes))
        self.proposer = DraftProposer(self.runner)
        self.speculation = Speculation(self.proposer, 4, FreeDraftTokens())
        self.core = make_core(self.speculation, **fields)

    def answers(self, prompts: list[list[int]], **params) -> list[list[int]]:
        for ticket, prompt in enumerate(prompts):
            self.core.scheduler.submit(request(f"r{ticket}", prompt, ticket=ticket, **params), 0)
        found = answers(run(self.core))
        self.proposer.check_integrity()
        return [found[f"r{ticket}", 0] for ticket in range(len(prompts))]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "logprobs": 1}])
def test_a_draft_that_thinks_alike_is_always_right(params):
    draft = Draft()
    prompts = [[i, *range(20 * i + 5)] for i in range(4)]
    got = draft.answers(prompts, max_tokens=30, **params)
    assert got == [golden(prompt, max_tokens=30, **params) for prompt in prompts]
    assert draft.speculation.accepted_tokens == draft.speculation.draft_tokens > 80


def test_choices_have_drafts_of_their_own():
    draft = Draft()
    draft.core.scheduler.submit(request("n", PROMPT, n=3, temperature=1.0, max_tokens=20), 0)
    got = answers(run(draft.core))
    plain = make_core(None)
    plain.scheduler.submit(request("n", PROMPT, n=3, temperature=1.0, max_tokens=20), 0)
    assert got == answers(run(plain))
    assert draft.speculation.accepted_tokens == draft.speculation.draft_tokens


def test_a_draft_that_thinks_otherwise_changes_nothing():
    draft = Draft(good=False)
    assert draft.answers([PROMPT], max_tokens=40) == [golden(PROMPT, max_tokens=40)]
    assert draft.speculation.accepted_tokens < draft.speculation.draft_tokens // 4


def test_long_prompts_are_caught_up_with_in_chunks_of_the_step():
    draft = Draft(step_tokens=32)
    seen = []
    execute = draft.runner.execute

    def watched(plan, on_layers_done=None):
        seen.append(sum(len(row.tokens) for row in plan.rows))
        return execute(plan, on_layers_done)

    draft.runner.execute = watched
    prompts = [list(range(100)), list(range(50, 170))]
    assert draft.answers(prompts, max_tokens=30) == [golden(p, max_tokens=30) for p in prompts]
    assert max(seen) <= 32
    assert draft.speculation.accepted_tokens > 10


def test_without_room_in_the_drafts_pool_there_are_no_guesses():
    draft = Draft(draft_blocks=2)
    assert draft.answers([PROMPT], max_tokens=20) == [golden(PROMPT, max_tokens=20)]
    assert draft.speculation.draft_tokens == 0


def test_without_room_for_all_there_are_guesses_for_some():
    draft = Draft(draft_blocks=5)
    prompts = [PROMPT, [7, *PROMPT]]
    assert draft.answers(prompts, max_tokens=20) == [golden(p, max_tokens=20) for p in prompts]
    assert draft.speculation.accepted_tokens > 0


def test_preempted_with_a_draft():
    draft = Draft(blocks=12)
    prompts = [list(range(i * 100, i * 100 + 60)) for i in range(3)]
    got = draft.answers(prompts, max_tokens=40)
    assert got == [golden(prompt, max_tokens=40) for prompt in prompts]
    assert draft.core.batch.preemptions > 0


def test_a_finished_request_gives_the_drafts_blocks_back():
    draft = Draft()
    draft.answers([PROMPT], max_tokens=20)
    draft.core.plan(0)
    assert draft.proposer._pool.counts().in_use == 0


def test_nan_in_the_draft_ends_the_guesses_and_nothing_else(monkeypatch):
    draft = Draft()

    def broken(plan, on_layers_done=None):
        raise NumericsError("NaN")

    monkeypatch.setattr(draft.runner, "execute", broken)
    assert draft.answers([PROMPT], max_tokens=20) == [golden(PROMPT, max_tokens=20)]
    assert draft.speculation.draft_tokens == 0
