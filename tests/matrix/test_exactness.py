"""Promise 1: the path never shows in the tokens. Every pair of ways, on two models.

``cases.py`` lists the ways, ``rig.py`` takes them. The page on what is covered is
``docs/design/exactness.md``: ``python -m tests.matrix.table`` generates it, a test compares it.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.model.artifact import resolve_model
from baton.model.lora_artifact import TARGETS
from baton.text.grammar import translate
from baton.text.tokenizer import load_tokenizer
from tests.engine import tiny_models
from tests.engine.conftest import MODEL
from tests.engine.lora_files import write_adapter
from tests.matrix import table
from tests.matrix.cases import WAYS, Case, every_case, every_pair, pairs_of, sample
from tests.matrix.rig import COMPETITOR_TOKENS, PROMPT_TOKENS, Rig
from tests.matrix.tiny import write_tiny

GRAMMAR = translate("regex", "([a-f0-9]{2}-){6,20}z")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("tiny")
    model = write_tiny(folder / "model")
    config = resolve_model(model).config
    adapter = write_adapter(folder / "lora", config, size=0.3)
    prompt = [3 + (7 * i) % 11 for i in range(PROMPT_TOKENS)]
    competitor = [5 + (i * i) % 200 for i in range(COMPETITOR_TOKENS)]
    rig = Rig(model, adapter, GRAMMAR, prompt, competitor)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    artifact = resolve_model(MODEL)
    adapter = write_adapter(tmp_path_factory.mktemp("real") / "lora", artifact.config, size=0.05)
    tokenizer = load_tokenizer(artifact.tokenizer)
    text = tokenizer.encode("one potato, two potatoes, three potatoes, four; " * 60)
    rig = Rig(MODEL, adapter, GRAMMAR, text[:PROMPT_TOKENS], text[5 : 5 + COMPETITOR_TOKENS])
    yield rig
    rig.close()


def check(rig: Rig, case: Case) -> None:
    """The tokens are those of the shortest way, and the case is what it says."""
    outcome = rig.run(case)
    assert outcome.tokens == rig.expected(case)
    assert len(outcome.tokens) == rig.max_tokens
    assert bool(outcome.preemptions) == case.preempted
    if case.path == "colocated" and not case.preempted:
        assert bool(outcome.cached_tokens) == (case.prefix != "cold")
    if case.speculation == "draft":
        assert outcome.draft_tokens


@pytest.mark.parametrize("case", every_pair(), ids=str)
def test_every_pair_on_a_tiny_model(tiny: Rig, case: Case) -> None:
    check(tiny, case)


@pytest.mark.costly
@pytest.mark.parametrize("family", ["smollm3", "gpt_oss"])
def test_every_pair_of_other_families(tmp_path: Path, family: str) -> None:
    tokenizer = Path(write_tiny(tmp_path / "llama")) / "tokenizer.json"
    model = tiny_models.save(tiny_models.build(family), tmp_path / "model")
    (model / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    config = resolve_model(str(model)).config
    adapter = write_adapter(tmp_path / "lora", config, size=0.3, targets=TARGETS[:4])
    prompt = [3 + (7 * i) % 11 for i in range(PROMPT_TOKENS)]
    competitor = [5 + (i * i) % 200 for i in range(COMPETITOR_TOKENS)]
    rig = Rig(str(model), adapter, GRAMMAR, prompt, competitor)
    for case in every_pair():
        ranks = min(case.ranks, 2) if case.kv == "bf16" else 1  # the tiny model shows the rest
        check(rig, replace(case, ranks=ranks))
    rig.close()


def is_long(case: Case) -> bool:
    """Two ranks or a draft model take this model ten seconds and more."""
    return case.ranks > 1 or case.speculation == "draft"


@pytest.mark.costly
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] if is_long(case) else [])
        for case in every_pair()
        if case.ranks < 3
    ],
)
def test_pairs_on_the_real_model(real: Rig, case: Case) -> None:
    check(real, case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_sample_of_all_cases_on_a_tiny_model(tiny: Rig) -> None:
    broken = []
    for case in sample():
        try:
            check(tiny, case)
        except AssertionError as error:
            broken.append(f"{case}: {str(error).splitlines()[0]}")
    assert not broken


def test_what_may_show_does_show(tiny: Rig) -> None:
    """Grammar, adapter and seed do change the tokens: equality is no accident."""
    plain = every_pair()[0].plain
    changes = [{}, {"grammar": True}, {"adapter": True}, {"sampling": "seeded"}]
    cases = [replace(plain, **change) for change in changes]
    assert len({tuple(tiny.expected(case)) for case in cases}) == len(cases)


def test_the_covering_set_covers_every_pair() -> None:
    covered = set().union(*(pairs_of(case) for case in every_pair()))
    wanted = set().union(*(pairs_of(case) for case in every_case()))
    assert covered == wanted
    assert len(wanted) > 200
    assert set(WAYS) == set(Case.__slots__)
    assert set().union(*(pairs_of(case) for case in sample())) == wanted


@pytest.mark.costly
def test_the_page_on_exactness_says_what_is_covered() -> None:
    committed = table.PAGE.read_text(encoding="utf-8")
    assert committed == table.page(), "run: python -m tests.matrix.table"
