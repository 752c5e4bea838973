"""The live page with 2, 50 and 1,000 workers, at three widths, light and dark."""

import asyncio
import os
import re
import time
from pathlib import Path
from statistics import median

import pytest

from baton.config.clients import SloConfig
from tests.router.page.crowd import Crowd
from tests.router.page.layout import faults, top_of
from tests.router.page.test_page import needs_browser

SIZES = ((390, 844), (1040, 800), (1600, 900))
LIMITS = SloConfig(ttft_s=5, itl_s=1)
GAPS = """(() => {
    const line = document.querySelector('#edges path').getBoundingClientRect();
    const left = byId('prefill').getBoundingClientRect();
    const right = byId('decode').getBoundingClientRect();
    return [line.left - left.right, right.left - line.right];
})()"""
IDS = "[...document.querySelectorAll('#prefill .worker')].map(cell => cell.dataset.worker)"


CUT_LABELS = """(async () => {
    const cut = [], pen = document.createElement('canvas').getContext('2d');
    pen.font = '11px system-ui, sans-serif';
    for (const { id, uplot } of state.plots) for (const past of [0, 21, 150, 299]) {
        const last = 1.8e9 + past;
        uplot.setData([[last - 600, last], ...uplot.series.slice(1).map(() => [1, 2])]);
        await new Promise((done) => setTimeout(done));
        const { _splits, _values } = uplot.axes[0];
        _values.forEach((text, at) => {
            const right = uplot.over.offsetLeft + uplot.valToPos(_splits[at], 'x');
            const half = pen.measureText(text || '').width / 2;
            if (right + half > uplot.width) cut.push([id, text]);
            if (text && right - half < uplot.over.offsetLeft) cut.push([id, text, 'beside the 0']);
        });
        if (_values.filter(Boolean).length < 1) cut.push([id, _values]);
    }
    return cut;
})()"""


LATE = """(() => {
    const kept = state.samples, outcome = (at) => (at < 200 ? { good: 10 } : { late: 10 });
    state.samples = Array.from({ length: 300 }, (_, at) =>
        ({ at_s: 1000 + at, limited: at % 2 ? {} : outcome(at) }));
    const late = problems().find((one) => one.text.includes('in time'));
    state.samples = state.samples.slice(0, 200);
    const well = problems().find((one) => one.text.includes('in time'));
    state.samples = kept;
    return [late.text, late.since_s, well ?? null];
})()"""


async def open_crowd(make_fleet, tab, workers: int, *, busy: bool = True) -> Crowd:
    fleet = await make_fleet({}, slo=LIMITS)
    crowd = Crowd(fleet, workers // 2, workers // 2, busy=busy)
    crowd.past()
    tab.absent.add("/fleet/planner")  # there is no controller to ask
    await tab.show_as(1600, 900, "light")
    await tab.go(fleet.url)
    await tab.until(f"document.querySelectorAll('.worker').length === {workers}")
    return crowd


def keep(image: bytes, name: str) -> None:
    """Write a screenshot to the folder ``BATON_SCREENSHOTS``, as CI does, if it is set."""
    if folder := os.environ.get("BATON_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(image)


@needs_browser
@pytest.mark.parametrize("workers", [2, 50, 1000])
async def test_nothing_overlaps_or_is_cut_and_the_first_screen_answers(make_fleet, tab, workers):
    crowd = await open_crowd(make_fleet, tab, workers)
    long_name = "decode-0"
    crowd.die(long_name, "killed by SIGKILL (9) after the kernel had no memory for it")
    await tab.until("byId('problems').textContent.includes('SIGKILL')")
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            await tab.show_as(width, height, scheme)
            await tab.js("new Promise(requestAnimationFrame)")
            assert await faults(tab) == [], f"{workers} workers, {width} px, {scheme}"
            # Well, in time, wrong, since when: without scrolling.
            for part in ("#health", "#problems .since", "#goodput-now", "#ttft", "#itl", "#errors"):
                assert 0 < await top_of(tab, part) < height, (part, width)
            image = await tab.screenshot()
            assert int.from_bytes(image[16:20], "big") == width, (
                "the picture is as wide as the page"
            )
            keep(image, f"{workers}-workers-{width}-{scheme}")


@needs_browser
async def test_no_time_label_of_a_plot_is_cut(make_fleet, tab):
    """Half of the last label would be beyond the edge, half of the first one beside the 0."""
    await open_crowd(make_fleet, tab, 2)
    for width, height in SIZES:
        await tab.show_as(width, height, "light")
        assert await tab.js(CUT_LABELS) == [], width


@needs_browser
async def test_a_share_of_late_requests_has_the_time_since_when(make_fleet, tab):
    """From second 200 on all are late: at 206 more than a tenth of a minute's requests are."""
    await open_crowd(make_fleet, tab, 2)
    text = "0 % of the last minute's requests were in time"
    assert await tab.js(LATE) == [text, 1206, None]


@needs_browser
async def test_workers_in_natural_order_by_state_and_load_with_a_filter(make_fleet, tab):
    crowd = await open_crowd(make_fleet, tab, 50)
    ids = await tab.js(IDS)
    assert ids == [f"prefill-{number}" for number in range(25)], "prefill-2 comes before prefill-10"
    crowd.links["prefill-2"].status.running = 5
    crowd.links["prefill-2"].status.kv_blocks.leased = 1000
    crowd.links["prefill-9"].status.prefill_tokens_per_s = 900.0
    crowd.die("decode-3", "killed by SIGKILL (9)")
    look = "document.querySelector('[data-worker={}]').className"
    await tab.until(f"{look.format('decode-3')} === 'worker cell dead load-0'")
    await tab.until(f"{look.format('prefill-2')}.includes('load-4')")
    await tab.until(f"{look.format('prefill-9')}.endsWith(' slow')")
    await tab.js("byId('filter').value = 'dead'; filterCells()")
    left = "[...document.querySelectorAll('.cell')].filter(one => one.checkVisibility())"
    assert await tab.js(f"{left}.map(one => one.dataset.worker)") == ["decode-3"]
    assert await tab.js("byId('filtered').textContent") == "1 of 50 workers"
    await tab.js("byId('filter').value = ''; filterCells()")
    # With the keyboard: one stop for a pool, arrows within it, Enter opens.
    assert await tab.js("document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 2
    await tab.js("document.querySelector('#prefill .cell').focus()")
    arrow = "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})"
    await tab.js(f"document.activeElement.dispatchEvent({arrow})")
    assert await tab.js("document.activeElement.dataset.worker") == "prefill-1"
    await tab.key("Enter")
    await tab.until("byId('detail').open")
    assert await tab.js("location.hash") == "#worker=prefill-1"


@needs_browser
async def test_edges_are_drawn_where_kv_moved_and_lead_to_their_story(make_fleet, tab):
    crowd = await open_crowd(make_fleet, tab, 50, busy=False)
    series = crowd.fleet.router.observer.series
    await tab.until("document.querySelectorAll('#edges path').length === 0", 10)
    series.handed_over("prefill-3", "decode-7")
    await tab.until("document.querySelectorAll('#edges path').length === 1")
    assert min(await tab.js(GAPS)) > -2, "lines do not cross workers"
    await tab.js("document.querySelector('#edges path').remove()")
    await tab.show_as(1040, 800, "light")
    drawn = await tab.js(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame("
        "() => done(document.querySelectorAll('#edges path').length))))"
    )
    assert drawn == 1, "drawn again at once, not with the next refresh"
    assert min(await tab.js(GAPS)) > -2, "nor after a change of the window"
    await tab.js(
        "document.querySelector('#edges path')"
        ".dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    await tab.until("byId('detail').open")
    assert await tab.js("byId('detail-name').textContent") == "prefill-3 → decode-7"
    assert await tab.js("location.hash") == "#edge=prefill-3%3Edecode-7"
    assert "hand-offs" in await tab.js("byId('detail-lines').textContent")
    await tab.key("Escape")
    await tab.until("location.hash === ''")


@needs_browser
async def test_a_problem_says_since_when_and_leads_to_its_worker(make_fleet, tab):
    crowd = await open_crowd(make_fleet, tab, 50)
    await tab.until("byId('health').textContent === 'Well'")
    crowd.die("decode-5", "parked by an operator")
    await tab.until("byId('problems').textContent.includes('decode-5 is parked')")
    assert await tab.js("byId('health').textContent") == "Well", "an operator ordered that"
    for name in ("decode-3", "prefill-4", "prefill-11", "prefill-12"):
        crowd.die(name, "killed by SIGKILL (9)")
    await tab.until("byId('health').textContent === 'Degraded'")
    dead = "decode-3, prefill-4, prefill-11 and 1 more are dead (killed by SIGKILL (9))"
    await tab.until(f"byId('problems').textContent.includes('{dead}')")
    since_s = "state.workers.find(one => one.id === 'decode-3').since_s"
    shown = await tab.js("byId('problems').querySelector('.since').textContent")
    assert shown == f" since {await tab.js(f'clock({since_s})')}"
    await tab.js("byId('problems').querySelector('button').click()")
    assert await tab.js("byId('filter').value") == "dead"
    # The next problem is one worker's: it opens.
    await tab.js(
        "[...byId('problems').querySelectorAll('button')]"
        ".find(one => one.textContent.includes('parked')).click()"
    )
    await tab.until("byId('detail').open")
    told = await tab.js("byId('detail-lines').textContent")
    assert "parked since" in told
    assert "parked by an operator" in told
    assert await faults(tab) == []


@needs_browser
async def test_failures_and_a_standing_queue_are_problems(make_fleet, tab):
    crowd = await open_crowd(make_fleet, tab, 2, busy=False)
    series = crowd.fleet.router.observer.series
    for _ in range(900):
        series.answered(503, failed=False)
        series.answered(429, failed=False)
        series.ended(failed=True)
    await tab.until("byId('health').textContent === 'Degraded'")
    told = await tab.js("byId('problems').textContent")
    assert re.search(r"90\d requests failed in the last minute since \d", told)
    assert "900 requests refused with 429 in the last minute" in told
    await tab.js("state.workers.forEach((one, place) => { one.version = `0.${place}` })")
    await tab.js("showHealth()")
    assert "different versions: 0.0, 0.1" in await tab.js("byId('problems').textContent")
    await tab.js("""state.samples = state.samples.slice(-20).map((sample, place) =>
        ({ ...sample, errors: 0, refused: 0, queued: place > 4 ? 3 : 0 })); showHealth()""")
    assert "in the router's queue since" in await tab.js("byId('problems').textContent")


@needs_browser
@pytest.mark.slow
async def test_a_thousand_busy_workers_cost_the_browser_50_ms_a_refresh(make_fleet, tab):
    """CPU time of the browser's main thread: scripts, style, layout and paint."""
    crowd = await open_crowd(make_fleet, tab, 1000)

    async def move() -> None:
        while True:
            crowd.move()
            crowd.serve()
            await asyncio.sleep(1)

    moving = asyncio.create_task(move())
    await asyncio.sleep(3)
    await tab.call("Performance.setTimeDomain", timeDomain="threadTicks")
    await tab.call("Performance.enable")

    async def main_thread_s() -> float:
        measured = (await tab.call("Performance.getMetrics"))["metrics"]
        return {one["name"]: one["value"] for one in measured}["TaskDuration"]

    began_s, polls = await main_thread_s(), await tab.js("state.polls")
    await asyncio.sleep(15)
    took_s = await main_thread_s() - began_s
    refresh_ms = 1000 * took_s / (await tab.js("state.polls") - polls)
    moving.cancel()
    print(f"{refresh_ms:.1f} ms per refresh")
    assert refresh_ms <= 50


@pytest.mark.slow
async def test_a_page_of_a_thousand_workers_costs_the_router_few_plain_calls(make_fleet):
    """CPU time of the calls of one second, beside calls that do nothing, whatever the CPU is.

    Both have the time of the client that makes them here. On a Zen 5 they took less than 1 % of a
    core.
    """
    fleet = await make_fleet({}, slo=LIMITS)
    Crowd(fleet, 500, 500).past()
    await fleet.http.get("/fleet/cells")

    async def call_ms(path: str) -> float:
        took_ms = []
        for _ in range(21):
            began_s = time.thread_time()
            answer = await fleet.http.get(path)
            took_ms.append(1000 * (time.thread_time() - began_s))
            assert answer.status_code == 200
        print(f"{path}: {median(took_ms):.2f} ms")
        return median(took_ms)

    calls = ("/fleet/cells", "/fleet/requests?limit=40&order=newest", "/fleet/tenants?limit=50")
    series = f"/fleet/series?workers=false&after={fleet.router.observer.series.last - 1}"
    plain_ms = await call_ms("/health/live")
    total_ms = sum([await call_ms(path) for path in (*calls, series)])
    assert total_ms <= 15 * plain_ms
