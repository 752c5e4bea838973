"""The live page in a real browser: what it shows, what it loads, keys, keyboard, both schemes."""

import re
import time
from dataclasses import replace

import msgspec
import pytest

from baton.config.clients import ApiKeyConfig, SloConfig
from baton.planner.state import Figures, Nothing, Resize, RoleChange
from baton.registry.admin_commands import CommandReply
from fleet.pools.planning import AppliedDecision
from router.sources import LaneTables
from tests.registry.conftest import redis_server, registry
from tests.router.emulated_worker import Script
from tests.router.page.chromium import CHROMIUM

__all__ = ["redis_server", "registry"]

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium"
)
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


async def test_the_page_and_its_parts_are_served_with_a_strict_policy(make_fleet):
    fleet = await make_fleet({}, api_keys={"k": ApiKeyConfig(tenant="t")})
    page = await fleet.http.get("/")
    assert page.status_code == 200, "the page itself needs no key"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in re.findall(r'(?:href|src)="(page/[^"]+)"', page.text):
        part = await fleet.http.get(f"/{path}")
        assert part.status_code == 200
        assert part.headers["x-content-type-options"] == "nosniff"
        again = await fleet.http.get(f"/{path}", headers={"if-none-match": part.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert "://" not in page.text, "nothing from other hosts"
    assert "style=" not in page.text
    assert (await fleet.http.get("/page/index.html")).status_code == 404
    assert (await fleet.http.get("/page/..%2fapp.py")).status_code == 404
    own = (await fleet.http.get("/page/page.js")).text
    assert "innerHTML" not in own


@needs_browser
async def test_fleet_requests_explanation_and_chat(make_fleet, tab, tmp_path):
    fleet = await make_fleet(
        {
            "prefill-0": None,
            "prefill-1": Script(prefill_tokens_per_s=400),
            "decode-0": Script(step_s=0.01),
            "decode-1": Script(step_s=0.01),
        }
    )
    await tab.show_as(1280, 900, "light")
    await tab.go(fleet.url)
    await tab.until("document.querySelectorAll('.worker').length === 4")
    shown = await tab.js("[...document.querySelectorAll('.worker')].map(w => w.dataset.worker)")
    assert sorted(shown) == sorted(NAMES)
    assert "500 free" in await tab.js("document.querySelector('.blocks').ariaLabel")
    slow = await tab.js("document.querySelector('.worker.slow').textContent")
    assert "prefill-1" in slow, "the slow prefill worker is marked"
    assert "3000 tokens/s" in slow
    # A chat by the page: its answer, its route, and the way to its story.
    await tab.js("byId('mode').value = 'disaggregated'; byId('send').click()")
    await tab.until("byId('told').textContent.includes('mode=disaggregated')")
    assert len(await tab.js("byId('answer').textContent")) > 10
    await tab.until("document.querySelectorAll('#edges .moving').length > 0")
    await tab.until("document.querySelectorAll('#requests tr').length === 1")
    listed = await tab.js("byId('requests').textContent")
    assert "sky" not in listed, "no text of prompts in the list"
    # By keyboard alone: to the request, open it, close it.
    await tab.js("byId('slowest').focus()")
    await tab.key("Tab")
    await tab.key("Tab")
    assert (await tab.js("document.activeElement.dataset.request ?? ''")).startswith("chatcmpl-")
    await tab.key("Enter")
    await tab.until("byId('story').open")
    assert await tab.js("byId('story-why').textContent.length") > 10
    assert await tab.js("document.querySelectorAll('#story-candidates tbody tr').length") >= 2
    assert await tab.js("document.querySelectorAll('.phase').length") == 10
    await tab.key("Escape")
    await tab.until("!byId('story').open")
    # The plots have points, and the browser asked nobody but the router.
    await tab.until("state.plots[0].uplot.data[1]?.some(value => value > 0)")
    foreign = [u for u in tab.urls if not u.startswith((fleet.url, "about:", "data:"))]
    assert foreign == []
    # Dark and narrow: colours follow the scheme, nothing is wider than the window.
    light = await tab.js("getComputedStyle(document.body).backgroundColor")
    await tab.show_as(390, 800, "dark")
    assert await tab.js("getComputedStyle(document.body).backgroundColor") != light
    assert await tab.js("document.documentElement.scrollWidth") <= 390
    # Nor while a plot still has the width that the window had.
    await tab.js("state.plots[0].uplot.setSize({ width: 800, height: 150 })")
    assert await tab.js("document.documentElement.scrollWidth") <= 390


@needs_browser
async def test_a_fleet_with_latency_limits_shows_its_goodput_and_the_changes_of_roles(
    make_fleet, tab
):
    names = ("decode-0", "decode-2", "decode-10")
    fleet = await make_fleet(dict.fromkeys(names), slo=SloConfig(ttft_s=5, itl_s=1))
    tab.absent.add("/fleet/planner")  # there is no controller to ask
    await tab.show_as(1280, 900, "light")
    await tab.go(fleet.url)
    await tab.until("document.querySelectorAll('#decode .worker').length === 3")
    shown = await tab.js("[...document.querySelectorAll('.worker')].map(w => w.dataset.worker)")
    assert shown == list(names), "10 comes after 2"
    await tab.until("byId('goodput-now').textContent === 'no latency limits'")
    assert await tab.js("byId('planner-section').hidden"), "no request had limits yet"
    await fleet.chat()
    record = fleet.lane.gateway.workers.get("decode-0").record
    fleet.directory.put(msgspec.structs.replace(record, role="prefill", turn=1))
    await tab.until("!byId('planner-section').hidden")
    await tab.until("byId('goodput-now').textContent === '100 % good'")
    await tab.until("state.samples.at(-1).last_turn === 1")
    await tab.until("document.querySelectorAll('#prefill .worker').length === 1")
    assert await tab.js("state.plots[3].uplot.data[2].some(value => value > 0)")
    await tab.show_as(390, 800, "dark")
    assert await tab.js("document.documentElement.scrollWidth") <= 390


class PlannerDesk:
    """Controller that answers with these decisions, the newest first."""

    def __init__(self) -> None:
        self.decided: list[AppliedDecision] = []

    async def ask(self, verb, *_):
        assert verb == "plan"
        decisions = [msgspec.to_builtins(one) for one in self.decided]
        return CommandReply(
            data={"mode": "auto", "slo": None, "reason": "", "decisions": decisions}
        )


@needs_browser
@pytest.mark.slow
async def test_decisions_of_the_planner_are_marks_with_their_reasons_beside_the_sizes(
    make_fleet, tab, registry
):
    figures = Figures(**dict.fromkeys(Figures.__struct_fields__, 1))
    desk = PlannerDesk()
    fleet = await make_fleet(
        {"prefill-0": None, "decode-0": None, "decode-1": None},
        slo=SloConfig(ttft_s=5, itl_s=1),
        tables=replace(LaneTables.of(registry), commands=desk),
    )
    await tab.show_as(1280, 900, "light")
    await tab.go(fleet.url)
    await fleet.chat()
    await tab.until("!byId('planner-section').hidden")
    await tab.until("byId('sizes-now').textContent === '1 + 2 now'")
    turn = RoleChange(worker_id="decode-1", role="prefill", reason="1 + 2 misses", figures=figures)
    wish = Resize(prefill=3, decode=2, reason="prompts wait 4.0 s")
    refused = Resize(prefill=9, decode=9, reason="too many")
    now_s = time.time()
    desk.decided = [
        AppliedDecision(at=now_s, decision=Nothing(reason="2 + 1 holds the load")),
        AppliedDecision(at=now_s, decision=refused, refused="no node has room"),
        AppliedDecision(at=now_s, decision=wish, done=True),
        AppliedDecision(at=now_s, decision=turn, done=True),
    ]
    record = fleet.lane.gateway.workers.get("decode-1").record
    fleet.directory.put(msgspec.structs.replace(record, role="prefill", turn=1))
    await tab.until("byId('sizes-now').textContent === '2 + 1 now'")
    found = "[...document.querySelectorAll('.mark')].map(mark => mark.title.slice(9)).sort()"
    await tab.until(f"{found}.length === 2 && {found}[0].startsWith('decode-1')", 40)
    assert await tab.js(found) == [
        "decode-1 became a prefill worker: 1 + 2 misses",
        "now 3 + 2 workers: prompts wait 4.0 s",
    ], "what was not done has no mark, and a turn of the planner has one"
    assert (await tab.js("byId('planner').textContent")).endswith("2 + 1 holds the load")
    sizes = "state.plots[6].uplot.data.slice(1).map(line => [line[0], line.at(-1)])"
    assert await tab.js(sizes) == [[1, 2], [2, 1]]
    # A hovered mark stays the same element, at its time, while new samples move it.
    kept = await tab.js("(window.kept = document.querySelector('.mark')).style.left")
    await tab.until(f"kept.style.left !== '{kept}'")
    assert await tab.js("kept.isConnected")
    # A turn that the planner did not decide.
    fleet.directory.put(msgspec.structs.replace(record, role="decode", turn=2))
    desk.decided = []
    await tab.until(f"{found}.includes('roles changed to 1 + 2')", 40)
    # Another plot has the same marks: the colour scheme has changed.
    await tab.show_as(390, 800, "dark")
    await tab.until(f"{found}.includes('roles changed to 1 + 2')")
    assert await tab.js("document.documentElement.scrollWidth") <= 390


@needs_browser
async def test_an_empty_fleet_and_a_router_that_goes_away(make_fleet, tab):
    fleet = await make_fleet({})
    await tab.go(fleet.url)
    await tab.until("!byId('nobody').hidden && !byId('no-requests').hidden")
    assert await tab.js("byId('trouble').hidden")
    fleet.server.should_exit = True
    await tab.until("byId('trouble').textContent.includes('does not answer')")
    tab.problems.clear()  # refused connections are errors in the console, rightly


@needs_browser
async def test_where_the_fleet_has_keys_the_page_asks_for_one(make_fleet, tab):
    keys = {
        "key-one": ApiKeyConfig(tenant="one"),
        "key-op": ApiKeyConfig(tenant="ops", role="operator"),
    }
    fleet = await make_fleet({"decode-0": None}, api_keys=keys)
    for key in keys:
        await fleet.chat(headers={"authorization": f"Bearer {key}"})
    await tab.go(fleet.url)
    await tab.until("!byId('key-form').hidden")
    assert await tab.js("document.querySelectorAll('.worker').length") == 0

    async def use(key: str) -> None:
        await tab.js(f"byId('key').value = '{key}'; byId('key-form').requestSubmit()")

    await use("key-one")
    await tab.until("document.querySelectorAll('#requests tr').length === 1")
    assert "tenant's" in await tab.js("byId('trouble').textContent")
    await use("key-op")
    await tab.until("document.querySelectorAll('.worker').length === 1")
    await tab.until("document.querySelectorAll('#requests tr').length === 2")
    assert await tab.js("byId('key-form').hidden && byId('trouble').hidden")
    assert await tab.js("localStorage.length === 0 && !document.cookie")
    tab.problems.clear()  # 401 and 403 stand in the console, rightly
