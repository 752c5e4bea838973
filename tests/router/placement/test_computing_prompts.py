"""Requests whose prefix is being computed wait for it, while that is not slower."""

import pytest

from baton.registry.types import EventBatch
from baton.types.geometry import BLOCK_TOKENS
from baton.types.params import SamplingParams
from router.request import GenerationRequest, Pinned
from router.routing.placement.booked_load import Booking, LoadBook
from router.routing.placement.computing_prompts import ComputingPrompts, SiblingWaits
from router.routing.placement.cost import WorkerLoad, price
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.prefix_sources import Source

SECOND = 10**9
RATE = 1000.0  # prompt tokens per second
SHARED, LENGTH = 500, 520  # blocks
NAMES = [number.to_bytes(16, "big") for number in range(1, LENGTH + 1)]
PROMPT = b"".join(NAMES)
OTHER = b"".join([*NAMES[:SHARED], *(name[::-1] for name in NAMES[SHARED:])])
STRANGER = b"".join(name[::-1] for name in NAMES)
SHARED_S = SHARED * BLOCK_TOKENS / RATE
WHOLE_S = LENGTH * BLOCK_TOKENS / RATE


def request(name: str, blocks: int = LENGTH, **more) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt=(0,) * (blocks * BLOCK_TOKENS + 1),
        sampling=SamplingParams(max_tokens=8),
        arrived_ns=0,
        deadline_ns=10**18,
        **more,
    )


def placed(
    worker: str, *, cached: int = 0, sources=(), queued: int = 0, rate: float = RATE, fitted=True
):
    load = WorkerLoad(
        worker_id=worker,
        incarnation=worker.encode().rjust(16),
        role="prefill",
        cached_blocks=cached,
        sources=sources,
        queued_tokens=queued,
        prefill_tokens_per_s=rate,
        prefill_token_s=1 / rate if fitted else 0.0,
        block_bytes=1,
    )
    tokens = LENGTH * BLOCK_TOKENS + 1
    return price(prefill=None, decode=load, prompt_tokens=tokens, expected_tokens=8)


class Fleet:
    """A prompt ``first`` is computed on worker ``a`` from second 0 on."""

    def __init__(self, limit: int = 100, **more) -> None:
        self.index = PrefixIndex()
        self.book = LoadBook()
        self.computing = ComputingPrompts(self.index, self.book)
        self.waits = SiblingWaits(self.computing, limit)
        self.stored = 0
        assert self.computing.begin("first", PROMPT, placed("a", **more), 0)

    def store(self, blocks: int, worker: str = "a") -> None:
        """Worker ``a`` has computed so many blocks of the prompt."""
        self.index.apply(
            EventBatch(
                incarnation=worker.encode().rjust(16),
                sequence=self.stored + 1,
                stored=tuple(NAMES[:blocks]),
            )
        )
        self.stored += 1

    def ask(
        self, name: str = "s", at_s: float = 0.0, chosen=None, hashes=OTHER, pullers=(), **more
    ):
        chosen = chosen or placed("b")
        now_ns = round(at_s * SECOND)
        return self.waits.ask(request(name, **more), chosen, hashes, now_ns, pullers)

    def due(self, at_s: float) -> list[str]:
        return self.waits.due(round(at_s * SECOND))


@pytest.fixture
def fleet():
    return Fleet()


def test_a_sibling_waits_until_the_blocks_that_it_shares_are_there(fleet):
    awaited = fleet.ask()
    assert (awaited.prompt.request_id, awaited.blocks) == ("first", SHARED)
    assert fleet.due(1.0) == []
    fleet.store(SHARED - 1)
    assert fleet.due(SHARED_S) == []
    fleet.store(SHARED)
    assert fleet.due(SHARED_S) == ["s"]
    assert fleet.ask(at_s=SHARED_S, chosen=placed("a", cached=SHARED)) is None


def test_it_is_asked_again_when_the_prompt_is_computed_or_has_ended(fleet):
    fleet.ask()
    assert fleet.computing.end("first") is not None
    assert fleet.due(0.1) == ["s"]
    assert fleet.ask(at_s=0.1) is None and not fleet.computing


def test_for_half_a_second_a_report_may_still_show_the_prompt_in_the_queue(fleet):
    """Its worker then looks busy, and an idle one would compute the prefix again."""
    fleet.ask()
    fleet.computing.end("first").computed_ns = 8 * SECOND
    assert fleet.due(8.0) == ["s"]
    assert fleet.ask(at_s=8.1) is not None
    assert fleet.ask(at_s=8.1, chosen=placed("a", cached=SHARED)) is None
    fleet.ask(at_s=8.1)
    assert fleet.ask(at_s=8.6) is None


@pytest.mark.parametrize("whole", [False, True])
def test_nothing_waits_for_a_report_that_is_there_or_subtracts_the_prompt(fleet, whole):
    """The worker is busy with other prompts then, and the wait is in vain."""
    fleet.book.book("a", "first", Booking(tokens=8, streams=1, at_ns=0, whole=whole))
    fleet.ask()
    fleet.computing.end("first").computed_ns = 8 * SECOND
    if not whole:
        fleet.book.reported("a", 8 * SECOND - 1)
        assert fleet.ask(at_s=8.1) is not None
        fleet.book.reported("a", 8 * SECOND)
    assert fleet.ask(at_s=8.1) is None


def test_a_wait_ends_by_rates_that_were_measured_since(fleet):
    slow = placed("b", rate=RATE / 4)
    assert fleet.ask(chosen=slow) is not None
    fleet.computing.end("first").computed_ns = 9 * SECOND
    fleet.computing.begin("second", PROMPT, placed("c"), 9 * SECOND)
    assert fleet.ask(at_s=9.6) is None


def test_a_wait_is_not_followed_by_another_that_is_as_long(fleet):
    fleet.ask()
    fleet.computing.end("first").computed_ns = 8 * SECOND
    fleet.computing.begin("second", PROMPT, placed("c"), 8 * SECOND)
    assert fleet.ask(at_s=8.6) is None


def test_nobody_waits_for_a_prompt_that_begins_otherwise(fleet):
    assert fleet.ask(hashes=STRANGER) is None and not fleet.waits.leave("s")


@pytest.mark.parametrize(
    "own",
    [
        placed("b", cached=SHARED),  # it is there already
        placed("b", rate=RATE * 2),  # computing it again is faster
        placed("b", sources=(Source("c", SHARED),)),  # so is pulling it
    ],
)
def test_nobody_waits_longer_than_the_prefix_takes_otherwise(fleet, own):
    assert fleet.ask(chosen=own) is None


def test_a_prompt_that_was_placed_by_a_guessed_rate_is_waited_for_by_a_measured_one():
    guessed = Fleet(rate=RATE / 4, fitted=False)
    assert guessed.ask(chosen=placed("b")) is not None
    assert guessed.ask("t", chosen=placed("b", rate=RATE / 4, fitted=False)) is not None


def test_the_queue_before_the_prompt_counts():
    behind = Fleet(queued=2 * LENGTH * BLOCK_TOKENS)
    assert behind.ask() is None
    behind.store(50)  # it has begun, whatever was predicted
    assert behind.ask() is not None


QUEUE = round(0.5 * RATE)  # tokens of siblings behind the prompt


def behind(left_blocks: int = SHARED):
    """The cheapest placement: behind the prompt and siblings, with the prefix that it computes."""
    return placed("a", cached=SHARED, queued=left_blocks * BLOCK_TOKENS + QUEUE)


IDLE, BUSY = placed("b"), placed("b", queued=10 * LENGTH * BLOCK_TOKENS)


def test_a_sibling_waits_for_blocks_that_an_idle_worker_can_pull_instead_of_in_a_queue(fleet):
    awaited = fleet.ask(chosen=behind(), pullers=[behind(), IDLE])
    assert (awaited.prompt.request_id, awaited.blocks) == ("first", SHARED)
    fleet.store(SHARED)
    assert fleet.due(SHARED_S) == ["s"]
    assert fleet.ask(at_s=SHARED_S, chosen=behind(0), pullers=[behind(), IDLE]) is None


@pytest.mark.parametrize(
    ("chosen", "pullers"),
    [
        (behind(), []),  # pulls are switched off
        (behind(), [behind(), BUSY]),
        (placed("a", cached=SHARED, queued=SHARED * BLOCK_TOKENS), [IDLE]),  # no siblings before it
    ],
)
def test_it_queues_behind_siblings_when_nothing_is_faster(fleet, chosen, pullers):
    assert fleet.ask(chosen=chosen, pullers=pullers) is None


def test_a_wait_for_a_pull_ends_a_fifth_of_a_second_after_the_first_token(fleet):
    """Without Redis the index never has the blocks."""
    pullers = [behind(), IDLE]
    fleet.ask(chosen=behind(), pullers=pullers)
    fleet.computing.end("first").computed_ns = 8 * SECOND
    assert fleet.due(8.0) == ["s"]
    assert fleet.ask(at_s=8.19, chosen=behind(0), pullers=pullers) is not None
    assert fleet.ask("t", at_s=8.19, chosen=behind(0), pullers=pullers) is None
    assert fleet.ask(at_s=8.21, chosen=behind(0), pullers=pullers) is None


@pytest.mark.parametrize(("missing", "waits"), [(60, True), (1, False)])
def test_after_the_first_token_it_waits_for_the_last_blocks_to_pull(fleet, missing, waits):
    """The index has them some 0.1 s later, and each sibling would compute them again."""
    chosen = placed("b", sources=(Source("a", SHARED - missing),))
    assert fleet.ask() is not None
    fleet.store(SHARED - missing)
    fleet.computing.end("first").computed_ns = 8 * SECOND
    assert fleet.due(8.0) == ["s"]
    assert (fleet.ask(at_s=8.05, chosen=chosen, pullers=[chosen]) is not None) is waits
    fleet.store(SHARED)
    assert fleet.ask(at_s=8.1, chosen=placed("b", sources=(Source("a", SHARED),))) is None


def test_a_wait_for_a_pull_ends_without_progress_and_after_twice_its_time(fleet):
    pullers = [behind(), IDLE]
    fleet.ask(chosen=behind(), pullers=pullers)
    late_s = 1.1 * (WHOLE_S + 0.6)
    assert fleet.due(8.0) == [] and fleet.due(late_s) == ["s"]
    assert fleet.ask(at_s=late_s, chosen=behind(), pullers=pullers) is None

    fleet.ask("t", chosen=behind(), pullers=pullers)
    fleet.store(SHARED - 1)
    assert fleet.ask("t", at_s=late_s, chosen=behind(), pullers=pullers) is not None
    fleet.store(SHARED - 1)
    assert fleet.ask("t", at_s=2.5 * late_s, chosen=behind(), pullers=pullers) is None


@pytest.mark.parametrize(
    "more",
    [{"pooling": "mean"}, {"pinned": Pinned(prefill="b", decode="b")}, {"probe": True}],
)
def test_requests_that_cannot_use_the_prefix_do_not_wait(fleet, more):
    assert fleet.ask(**more) is None


def test_a_prompt_without_progress_is_given_up_after_the_time_of_computing(fleet):
    fleet.ask()
    assert fleet.due(WHOLE_S) == []
    late_s = 1.2 * WHOLE_S
    assert fleet.due(late_s) == ["s"]
    assert fleet.ask(at_s=late_s) is None
    assert fleet.waits.leave("s")


def test_one_with_progress_is_waited_for_but_at_most_twice_as_long(fleet):
    fleet.ask()
    late_s, last_s = 1.2 * WHOLE_S, 2.4 * WHOLE_S
    fleet.store(400)
    assert fleet.due(late_s) == ["s"]
    assert fleet.ask(at_s=late_s) is not None
    fleet.store(450)
    assert fleet.due(last_s) == ["s"]
    assert fleet.ask(at_s=last_s) is None


def test_after_a_death_it_waits_for_the_next_worker(fleet):
    """The request of the dead worker is placed again, and computed from the start."""
    fleet.ask()
    fleet.store(400)
    fleet.computing.begin("first", PROMPT, placed("c"), 5 * SECOND)
    assert fleet.due(5.0) == ["s"]
    assert fleet.ask(at_s=5.0) is not None
    assert fleet.due(5.1) == []
    fleet.computing.move("first", placed("d").decode, 6 * SECOND)
    assert fleet.due(6.0) == ["s"]
    assert fleet.ask(at_s=6.0) is not None
    assert fleet.due(6.0 + SHARED_S) == []


def test_a_second_sibling_waits_for_a_pull_in_place_of_pulling_too(fleet):
    fleet.store(LENGTH)
    source = placed("b", sources=(Source("a", SHARED),))
    assert source.links
    assert fleet.ask(chosen=source) is None
    assert fleet.computing.begin("s", OTHER, source, 0)
    assert fleet.ask("t", chosen=source, hashes=PROMPT).prompt.request_id == "s"
    fleet.stored = 0
    fleet.store(SHARED, worker="b")
    assert fleet.due(0.01) == ["t"]


def test_it_waits_for_the_prompt_that_saves_most(fleet):
    fleet.computing.begin("ahead", PROMPT, placed("c", cached=300), 0)
    assert fleet.ask().prompt.request_id == "ahead"


def test_blocks_count_at_the_worker_that_computes_them_and_not_where_they_are_pulled(fleet):
    held: dict[bytes, int] = {}
    source = placed("b", sources=(Source("a", SHARED),))
    fleet.computing.begin("s", OTHER, source, 0)
    fleet.computing.add_held(OTHER, held)
    assert held == {b"a".rjust(16): SHARED}


def test_short_prompts_are_not_recorded(fleet):
    assert not fleet.computing.begin("short", PROMPT, placed("a", cached=LENGTH - 1), 0)
    assert fleet.computing.begin("long", PROMPT, placed("a", cached=LENGTH - 10), 0)


def test_both_tables_are_bounded(monkeypatch):
    few = Fleet(limit=2)
    assert [few.ask(name) is not None for name in "stu"] == [True, True, False]
    recorded = [few.computing.begin(f"r{n}", PROMPT, placed("a"), 0) for n in range(1100)]
    assert sum(recorded) == 1023
    for number in range(1100):
        few.computing.end(f"r{number}")
    assert few.computing.begin("r", PROMPT, placed("a"), 0)
    assert list(few.computing.shared(STRANGER)) == []
    long = b"".join(number.to_bytes(16, "little") for number in range(262_144))
    assert not few.computing.begin("long", long, placed("a"), 0)


def test_siblings_wait_until_those_ahead_take_longer_than_computing_again(fleet):
    """Each has 20 blocks of its own: 0.32 s. A wait may be 1.2 s longer than computing."""
    waits = [fleet.ask(f"s{number}") for number in range(6)]
    assert [wait is not None for wait in waits] == [True, True, True, True, False, False]
    assert fleet.waits.leave("s1")
    assert fleet.ask("s5") is not None
    assert fleet.ask("s0") is not None, "one that waits has its place"
    for name in ("s0", "s2", "s3", "s5"):
        fleet.waits.leave(name)
    assert waits[0].prompt.waiting_s == pytest.approx(0)
