"""Tensor parallelism with real rank processes: the width never shows in the bits."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.core.params import SamplingParams
from engine.core.plan import StepPlan
from engine.ipc import EngineSettings
from engine.numerics import same_bits
from engine.parallel import lead
from engine.process import map_pool
from engine.ranks import Loaded, RankError, RankProcesses, splits_of
from engine.runner import open_runner
from engine.splitcheck import product_split_fault
from engine.text.artifact import ModelError, resolve_model
from tests.engine.conftest import MODEL, Driver
from tests.engine.tiny_llama import write_llama

SEEDED = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, seed=1234)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


class Replica:
    """A leader in this process, with its ranks."""

    def __init__(self, settings: EngineSettings) -> None:
        self.pool_fd = os.memfd_create("test-kv")
        self.ranks = None
        if settings.tensor_parallel > 1:
            self.ranks = RankProcesses(settings, self.pool_fd)
        try:
            runner, self.info = open_runner(
                settings, lambda g: map_pool(self.pool_fd, g), lambda _: None, self.ranks
            )
        except BaseException:
            self.close()
            raise
        self.runner = runner
        self.driver = Driver(runner)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        os.close(self.pool_fd)


@contextmanager
def replica(
    model: str, ranks: int, *, dtype: str = "bf16", numerics: str = "exact"
) -> Iterator[Replica]:
    settings = EngineSettings(
        model=model, dtype=dtype, numerics=numerics, kv_blocks=160, tensor_parallel=ranks
    )
    opened = Replica(settings)
    try:
        yield opened
    finally:
        opened.close()


def prompt_of(length: int, vocab: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(vocab) for i in range(length)]


def everything(one: Replica) -> tuple[str, list[torch.Tensor], list[object]]:
    """What must not depend on the width: numerics id, bits of hidden states, tokens."""
    driver = one.driver
    vocab = one.runner._model.config.vocab_size
    tokens = prompt_of(150, vocab)
    short, long = driver.blocks(20), driver.blocks(150, scattered=True)
    first = driver.row(tokens, 0, 70, long)
    hidden = one.runner.hidden(StepPlan((first,)))
    mixed = (driver.row(tokens, 70, 150, long), driver.row(tokens, 0, 20, short))
    hidden += one.runner.hidden(StepPlan(mixed))
    answers: list[object] = [driver.answer(tokens, GREEDY), driver.answer(tokens[:9], SEEDED)]
    answers.append(driver.answer(tokens, SEEDED, chunks=[7, 64], scattered=True))
    return one.info.numerics_id, hidden, answers


def assert_same(got: tuple, expected: tuple) -> None:
    assert got[0] == expected[0], "pairs of different widths must be able to hand over"
    for left, right in zip(got[1], expected[1], strict=True):
        assert same_bits(left, right)
    assert got[2] == expected[2]


def check_widths(model: str, widths: list[int], dtype: str) -> None:
    with replica(model, 1, dtype=dtype) as alone:
        expected = everything(alone)
    for ranks in widths:
        with replica(model, ranks, dtype=dtype) as group:
            assert_same(everything(group), expected)


def test_one_kv_head_for_three_ranks(tmp_path: Path) -> None:
    """Each rank holds the same KV head, and one or two of its four query heads."""
    check_widths(write_llama(tmp_path / "tiny"), [3], "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (5, 5)])
def test_any_heads_and_widths(tmp_path: Path, heads: int, kv_heads: int, dtype: str) -> None:
    check_widths(write_llama(tmp_path / "tiny", heads=heads, kv_heads=kv_heads), [2, 3, 4], dtype)


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, "bf16"),
        pytest.param(2, "fp32", marks=pytest.mark.slow),
        pytest.param(3, "bf16", marks=pytest.mark.slow),
        pytest.param(3, "fp32", marks=pytest.mark.slow),
        pytest.param(4, "bf16", marks=pytest.mark.slow),  # more ranks than KV heads
    ],
)
def test_smollm2_gives_the_bits_of_one_rank(ranks: int, dtype: str) -> None:
    check_widths(MODEL, [ranks], dtype)


@pytest.mark.slow
def test_fast_numerics_give_the_greedy_tokens_of_one_rank_in_fp32() -> None:
    tokens = prompt_of(60, 49_152)
    with replica(MODEL, 1, dtype="fp32", numerics="fast") as alone:
        expected = alone.driver.answer(tokens, GREEDY)
    with replica(MODEL, 3, dtype="fp32", numerics="fast") as group:
        assert group.driver.answer(tokens, GREEDY) == expected


# --- what cannot work is refused by name, and a dead or stuck rank is not waited for ------------


def test_a_width_that_the_model_does_not_allow_is_refused_by_name(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny")
    with pytest.raises(ModelError, match="tensor_parallel = 5: the model has 4 query heads"):
        with replica(model, 5):
            pass


def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny")
    settings = EngineSettings(model=str(tmp_path / "other"), tensor_parallel=2)
    ranks = RankProcesses(settings)
    try:
        with pytest.raises(RankError, match=r"rank 1 .*: ModelError: .*other"):
            lead(resolve_model(model).config, ranks)
            ranks.wait_until(Loaded)
    finally:
        ranks.close()


def test_a_product_whose_columns_depend_on_their_number_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve_model(write_llama(tmp_path / "tiny")).config
    assert product_split_fault(config, splits_of(config, 3), torch.bfloat16) is None

    def product(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        y_MN = x_MK.float() @ weight_NK.float().T
        return y_MN + 1e-3 if weight_NK.shape[0] == 32 else y_MN

    monkeypatch.setattr("engine.linear._pack", lambda weight_NK: weight_NK)
    monkeypatch.setattr("engine.linear._product", product)
    fault = product_split_fault(config, splits_of(config, 2), torch.float32)
    assert fault == "o of rank 0 (32 of 80 columns)"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny")


def test_a_killed_rank_is_noticed_between_steps_and_within_one(tiny: str) -> None:
    with replica(tiny, 3) as group:
        tokens = prompt_of(40, 512)
        group.driver.answer(tokens, GREEDY)
        group.ranks.check()  # all is well
        os.kill(group.ranks.pids[1], signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(RankError, match=r"rank 2 \(pid \d+\) ended with code -9"):
            group.driver.answer(tokens, GREEDY)
        assert time.monotonic() - began_s < 3.0
        with pytest.raises(RankError, match="rank 2"):
            group.ranks.check()


def test_a_stopped_rank_is_waited_for_no_longer_than_a_step_may_take(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.parallel.STEP_TIMEOUT_S", 1.0)  # the leader's patience
    with replica(tiny, 2) as group:
        os.kill(group.ranks.pids[0], signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(RankError, match="does not answer"):
            group.driver.answer(prompt_of(40, 512), GREEDY)
        assert 1.0 <= time.monotonic() - began_s < 4.0


def test_ranks_end_with_their_leader(tiny: str) -> None:
    with replica(tiny, 3) as group:
        pids = group.ranks.pids
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
