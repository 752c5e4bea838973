"""Bookings last until the engine of a worker can have the prompt."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from router.routing.placement.booked_load import Booking, LoadBook
from router.routing.placement.cost import WorkerLoad, price
from router.routing.placement.placer import Placer
from router.routing.placement.prefix_sources import Source
from tests.router.requests.fake_links import request

SECOND = 10**9


def placer_of_64_places() -> SimpleNamespace:
    settings = SimpleNamespace(window_requests=64)
    workers = SimpleNamespace(get=lambda worker_id: None)
    return SimpleNamespace(
        book=LoadBook(), _settings=settings, _workers=workers, answer_tokens=160.0
    )


def booked_after(
    seconds: float, *, links: tuple[Source, ...] = (), queued_tokens: int = 0, streams: int = 0
) -> int:
    """Prompt tokens that are still booked when a report of that time has come."""
    prefill = WorkerLoad(
        worker_id="p", incarnation=b"p", role="prefill", queued_tokens=queued_tokens
    )
    decode = WorkerLoad(
        worker_id="d", incarnation=b"d", role="decode", decode_step_s=0.2, streams=streams
    )
    chosen = price(prefill=prefill, decode=decode, prompt_tokens=3000, expected_tokens=10)
    chosen = chosen._replace(links=links, terms=chosen.terms._replace(pull_s=3.0 * bool(links)))
    placer = placer_of_64_places()
    Placer._book_load(placer, request(prompt=range(3000)), chosen, 0)
    placer.book.reported("p", round(seconds * SECOND))
    return placer.book.unreported("p").tokens


@pytest.mark.parametrize(("seconds", "tokens"), [(0.2, 3000), (0.3, 0)])
def test_a_prompt_is_booked_until_a_step_of_decode_is_over(seconds: float, tokens: int) -> None:
    assert booked_after(seconds, links=()) == tokens


@pytest.mark.parametrize(("seconds", "tokens"), [(3.1, 3000), (3.3, 0)])
def test_a_prompt_is_booked_until_its_prefix_is_pulled(seconds: float, tokens: int) -> None:
    assert booked_after(seconds, links=(Source("other", 4),)) == tokens


@pytest.mark.parametrize(("seconds", "tokens"), [(5.1, 3000), (5.3, 0)])
def test_a_pull_that_overlaps_the_queue_ends_with_it(seconds: float, tokens: int) -> None:
    """2 s of the worker's queue and 3 s beyond."""
    found = booked_after(seconds, links=(Source("other", 4),), queued_tokens=3000)
    assert found == tokens


@pytest.mark.parametrize(
    ("streams", "seconds", "tokens"),
    [(63, 0.3, 0), (64, 0.6, 3000), (64, 0.8, 0), (95, 16.1, 3000)],
)
def test_a_prompt_is_booked_until_a_full_batch_has_a_place(
    streams: int, seconds: float, tokens: int
) -> None:
    """Responses take 32 s, so one of 64 ends each half second."""
    assert booked_after(seconds, streams=streams) == tokens


def test_the_decode_worker_is_booked_the_tokens_of_all_choices() -> None:
    prefill = WorkerLoad(worker_id="p", incarnation=b"p", role="prefill")
    decode = WorkerLoad(worker_id="d", incarnation=b"d", role="decode")
    chosen = price(prefill=prefill, decode=decode, prompt_tokens=3000, expected_tokens=10)
    placer = placer_of_64_places()
    asked = request(prompt=range(3000), n=2)
    Placer._book_load(placer, asked, chosen, 0)
    assert placer.book.unreported("p").stream_tokens == 0
    assert placer.book.unreported("d")[2:] == (2, 6000)


def test_a_request_past_baton_is_booked_until_it_is_released() -> None:
    """No report shows it, however late."""
    worker = WorkerLoad(worker_id="d", incarnation=b"d", role="decode")
    chosen = price(prefill=None, decode=worker, prompt_tokens=3000, expected_tokens=10)
    placer = placer_of_64_places()
    past = replace(request(prompt=range(3000)), past_baton=True)
    Placer._book_load(placer, past, chosen, 0)
    placer.book.reported("d", 10**6 * SECOND)
    assert placer.book.unreported("d")[:3:2] == (3000, 1)
    placer.book.computed(past.request_id, 1)
    assert placer.book.unreported("d")[:3:2] == (0, 1)
    placer.book.release(past.request_id)
    assert not any(placer.book.unreported("d"))


@pytest.mark.parametrize(("whole", "settles_ms"), [(False, 50), (True, 20)])
def test_an_engine_behind_http_reports_a_prompt_at_once(whole: bool, settles_ms: int) -> None:
    """Counted twice until then, its queue looked up to three times as long as it was."""
    book = LoadBook()
    book.book("a", "r", Booking(tokens=100, streams=1, at_ns=SECOND, whole=whole))
    book.reported("a", SECOND + settles_ms * 1_000_000 - 1)
    assert book.unreported("a").tokens == 100
    book.reported("a", SECOND + settles_ms * 1_000_000)
    assert book.unreported("a").tokens == 0
