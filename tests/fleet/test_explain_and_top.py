"""What `baton explain` and `baton top` print of what the router says."""

import io
import re
import time

from rich.console import Console
from rich.text import Text

from baton.types.errors import UnavailableError
from fleet.cli.explain import list_of, report_of
from fleet.cli.top import Scrolled, frame
from router.routing.reports.refusals import refusal
from router.routing.requests.call import Call

TERMS = dict.fromkeys(
    (
        "queue_s",
        "adapter_s",
        "compute_s",
        "transfer_s",
        "room_s",
        "decode_s",
        "slowdown_s",
        "crowding_s",
    ),
    0.1,
)
CANDIDATE = {"prefill": "prefill-0", "decode": "decode-0", "mode": "disaggregated"}
CANDIDATE |= {"uncached_tokens": 40, "cost_s": 0.8, "terms": TERMS}
STORY = {
    "id": "chatcmpl-1",
    "state": "ended",
    "tenant": "a[b]",
    "prompt_tokens": 40,
    "elapsed_s": 1.5,
    "why": {"cause": "slow_prefill_worker", "sentence": "prefill-0 is slow."},
    "route": {
        "prefill": "prefill-0",
        "decode": "decode-0",
        "mode": "disaggregated",
        "cached_tokens": 16,
    },
    "regret_s": 0.5,
    "better": {"prefill": None, "decode": "decode-0"},
    "phases_s": {"prefill": 1.2, "decode": 0.3},
    "longest_gaps": [{"gap_s": 0.2, "before_token": 3, "at_s": 1.0}],
    "usual_gap_s": 0.01,
    "worker_times_s": {"preemptions": 2, "repaired_chunks": 0},
    "candidates": [CANDIDATE, {**CANDIDATE, "prefill": None}] * 6,
    "chosen": CANDIDATE,
    "prefix_from": [
        {"worker_id": "decode-1", "blocks": 60},
        {"worker_id": "decode-2", "blocks": 75},
    ],
    "timeline": [{"event": "arrived", "at_s": 0.0}, {"event": "first token", "at_s": 1.2}],
}
BLOCKS = {"total": 100, "free": 59, "cached": 20, "leased": 20, "quarantined": 1}
WORKER = {
    "id": "prefill-0",
    "role": "prefill",
    "state": "ready",
    "kv_blocks": BLOCKS,
    "running": 1,
    "waiting": 2,
}
SAMPLE = {"ttft_p99_s": 0.25, "itl_p99_s": None, "generated_tokens": 90, "took_s": 1.0}
SAMPLE |= {"queued": 3, "handoffs": {"prefill-0>decode-0": 4}}
LISTED = {"id": "chatcmpl-1", "state": "ended", "elapsed_s": 1.5, "first_token_s": None}
LISTED |= {"tenant": "search", "age_s": 3600.0}
LISTED |= {"prompt_tokens": 40, "completion_tokens": 0, "prefill": None, "decode": None}


def printed(shown, width: int = 160) -> str:
    console = Console(width=width, record=True, quiet=False, file=None)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def test_a_story_says_the_sentence_the_phases_and_the_prices() -> None:
    text = printed(report_of(STORY))
    assert text.index("prefill-0 is slow.") < text.index("phase")
    for words in ("tenant a[b]", "16 of 40", "regret 500.0 ms", "better: decode-0 → decode-0"):
        assert words in text
    assert "200.0 ms before token 3 (usually 10.0 ms)" in text
    assert "2 preemptions" in text
    assert "pulled from decode-1 (until block 60), then decode-2 (until block 75)" in text
    assert "and 4 more: --json" in text
    [first, second] = [line.split() for line in text.splitlines() if " 800.0 ms" in line][:2]
    assert first[:4] == ["→", "prefill-0", "→", "decode-0"]
    assert second[0] == "decode-0"


def test_a_story_reads_at_80_columns() -> None:
    """Every line is whole: no word is cut or broken."""
    text = printed(report_of(STORY), 80)
    assert "…" not in text
    heads = [line for line in text.splitlines() if "  800.0 ms  40  " in line]
    assert len(heads) == 8, "a placement, its cost and its tokens stand on one line"
    assert "queue 100.0 ms" in text
    idle = TERMS | {"queue_s": 0.0}
    assert "queue" not in printed(report_of(STORY | {"candidates": [CANDIDATE | {"terms": idle}]}))


def test_a_frame_that_is_longer_than_the_terminal_scrolls() -> None:
    view = Scrolled()
    view.content = Text("\n".join(f"line {number}" for number in range(1, 51)))
    console = Console(width=80, height=10, file=io.StringIO())

    def shown() -> list[str]:
        with console.capture() as captured:
            console.print(view)
        return captured.get().splitlines()

    assert shown() == [*(f"line {n}" for n in range(1, 10)), shown()[-1]]
    assert shown()[-1].startswith("lines 1 to 9 of 50")
    for key, first in ((b"j", 2), (b"\x1b[6~", 11), (b"G", 42), (b"j", 42), (b"b", 33), (b"g", 1)):
        assert view.press(key)
        assert shown()[0] == f"line {first}", key
    assert not view.press(b"q")
    view.content = Text("short")
    assert shown() == ["short"]


def test_workers_that_are_not_ready_come_first_then_in_natural_order() -> None:
    names = [("decode-10", "ready"), ("decode-9", "dead"), ("decode-2", "ready")]
    workers = [WORKER | {"id": name, "state": state} for name, state in names]
    moved = {"count": 0, "bytes": 0, "failures": 0}
    fleet = {"workers": workers, "transfers": moved}
    text = printed(frame("f", fleet, {"samples": [], "workers": {}}, []))
    assert text.index("decode-9") < text.index("decode-2") < text.index("decode-10")


def test_a_report_of_what_never_ran() -> None:
    bare = STORY | {"route": None, "regret_s": None, "candidates": [], "chosen": None}
    bare |= {"longest_gaps": [], "worker_times_s": None, "phases_s": {}}
    text = printed(report_of(bare))
    assert "was not placed" in text
    assert "no candidates" in text


def test_a_refused_request_says_why() -> None:
    call = Call(id="req-1", endpoint="chat", arrived_ns=0, tenant="a", status=503)
    refused = refusal(call, UnavailableError("no decode worker is ready"), refused_ns=2_000_000)
    shown = printed(report_of(refused.report))
    assert "Refused with 503 unavailable: no decode worker is ready" in shown
    assert "was not placed" in shown
    listed = printed(list_of([refused.line(0)]))
    assert "Refused with 503" in listed
    assert "waits" not in listed


def test_the_list_and_an_empty_one() -> None:
    assert "no request yet" in printed(list_of([]))
    text = printed(list_of([LISTED | {"sentence": "It failed."}]))
    assert "40 → 0" in text
    assert "search, -" in text
    hours = {time.strftime("%H:%M", time.localtime(time.time() - 3600 - ago_s)) for ago_s in (0, 9)}
    assert any(hour in text for hour in hours), "when it came"


def test_a_frame_of_a_busy_and_of_an_empty_fleet() -> None:
    moved = {"count": 5, "bytes": 2**20, "failures": 0}
    rates = {"prefill-0": {"prefill_tokens_per_s": 1234.5, "decode_step_s": None}}
    series = {"samples": [SAMPLE] * 70, "workers": rates}
    text = printed(frame("f", {"workers": [WORKER], "transfers": moved}, series, []))
    narrow = printed(frame("f", {"workers": [WORKER], "transfers": moved}, series, []), 80)
    assert "…" not in narrow
    assert re.search(r"prefill-0 +prefill +ready", narrow)
    for words in ("prefill-0", "20+20/100", "1234", "250 ms", "90 (best)", "40"):
        assert words in text, words
    empty = {"samples": [], "workers": {}}
    assert "EMULATED" not in text
    emulated = {"emulated": "epyc-135m", "workers": [], "transfers": moved}
    assert "EMULATED: no model runs" in printed(frame("f", emulated, empty, []), 60)
    text = printed(frame("f", {"workers": [], "transfers": moved}, empty, []), 60)
    assert "no request yet" in text
