"""One sample a second, bounded in number and in size."""

from baton.telemetry.live_series import MAX_EDGES, LiveSeries


def test_a_sample_holds_what_happened_since_the_last() -> None:
    series = LiveSeries()
    for wait_s in (0.1, 0.2, 0.3):
        series.first_token(wait_s)
    series.tokens(0.0, 1)
    series.tokens(0.02, 2)
    series.handed_over("prefill-0", "decode-0")
    series.prompt(100)
    series.prompt(20)
    series.ended(failed=False)
    series.ended(failed=True)
    for status, failed in ((200, False), (200, True), (400, False), (429, False), (503, False)):
        series.answered(status, failed=failed)
    sample = series.close(50.0, queued=2, running=3, sizes={"prefill": 1, "decode": 2})
    assert (sample.number, sample.at_s, sample.took_s) == (50, 50.0, 1.0)
    assert (sample.ttft_p50_s, sample.ttft_p99_s) == (0.2, 0.3)
    assert (sample.itl_p50_s, sample.generated_tokens) == (0.02, 3)
    assert (sample.prompt_tokens, sample.ended, sample.failed) == (120, 2, 1)
    assert (sample.refused, sample.errors) == (1, 2)
    assert (sample.queued, sample.running) == (2, 3)
    assert sample.handoffs == {"prefill-0>decode-0": 1}
    assert sample.as_dict()["sizes"] == {"prefill": 1, "decode": 2}
    empty = series.close(51.5, queued=0, running=0)
    assert (empty.number, empty.took_s) == (52, 1.5)
    assert (empty.ttft_p50_s, empty.generated_tokens, empty.handoffs) == (None, 0, {})


def test_a_reader_gets_what_it_has_not_seen() -> None:
    series = LiveSeries(limit=3)
    for at_s in range(5):
        series.close(float(at_s), queued=0, running=0)
    assert [sample.number for sample in series.after(0)] == [3, 4, 5]
    assert [sample.number for sample in series.after(4)] == [5]
    assert series.after(5) == []
    series.close(4.0, queued=0, running=0)  # the clock was set back
    assert [sample.number for sample in series.after(5)] == [6]


def test_a_busy_second_keeps_a_fair_part_of_its_waits() -> None:
    series = LiveSeries()
    for number in range(20_000):
        series.tokens((number % 1000 + 1) / 1000, 1)
    sample = series.close(0.0, queued=0, running=0)
    assert sample.generated_tokens == 20_000
    assert 0.4 < sample.itl_p50_s < 0.6
    assert sample.itl_p99_s > 0.95


def test_names_of_workers_cannot_grow_it() -> None:
    series = LiveSeries()
    for number in range(MAX_EDGES + 9):
        series.handed_over(f"prefill-{number}", "decode-0")
    assert len(series.close(0.0, queued=0, running=0).handoffs) == MAX_EDGES
