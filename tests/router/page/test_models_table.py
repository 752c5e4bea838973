"""The table of models on the live page, in a real browser and with a real Redis."""

from tests.registry.conftest import redis_server, registry
from tests.router.conftest import OPS
from tests.router.emulated_worker import answer_token
from tests.router.lanes.conftest import OTHER, two_lanes
from tests.router.page.test_page import needs_browser

__all__ = ["redis_server", "registry", "two_lanes"]

GOLDEN = {"name": "hi", "prompt": "hi", "max_tokens": 1, "tokens": [answer_token(0, 0, 0)]}
ROWS = "[...document.querySelectorAll('#models tr')]"


@needs_browser
async def test_operators_see_the_gate_of_a_canary_and_roll_it_back(two_lanes, registry, tab):
    lanes = await two_lanes(registry=registry)
    http = lanes.fleet.http
    await http.post(
        "/fleet/models", json={"verb": "gate", "name": OTHER, "golden": [GOLDEN]}, headers=OPS
    )
    canary = {"verb": "canary", "name": "smollm2", "model": OTHER, "share": 0.5}
    await http.post("/fleet/models", json=canary, headers=OPS)
    await tab.show_as(1400, 900, "light")
    await tab.go(lanes.fleet.url)
    await tab.until("!byId('models-section').hidden")
    for number in range(12):
        await lanes.fleet.chat(f"question {number}", max_tokens=2)
    await tab.until(f"{ROWS}[1].querySelectorAll('polyline').length === 2")
    await tab.until(f"{ROWS}[1].textContent.includes('✓ 1 golden prompts')")
    text = await tab.js(f"{ROWS}[1].textContent")
    assert "smollm2: canary 50 %" in text
    assert "requests failed" in text
    assert "p95 " in text
    assert "smollm2: 50 %" in await tab.js(f"{ROWS}[0].textContent")
    await tab.js(f"window.confirm = () => true; {ROWS}[1].querySelector('button').click()")
    await tab.until("!byId('key-form').hidden")  # a change needs the fleet's token
    assert all("401" in problem for problem in tab.problems)
    tab.problems.clear()
    await tab.js("byId('key').value = 'secret'; byId('key-form').requestSubmit()")
    await tab.until("byId('key-form').hidden")
    await tab.js(f"{ROWS}[1].querySelector('button').click()")
    await tab.until(f"!{ROWS}[1].querySelector('button')")
    assert not lanes.fleet.router.routes.table.names
    await http.post("/fleet/models", json=canary, headers=OPS)
    lanes.second.script.answer = [9]
    await tab.until(f"{ROWS}[1].textContent.includes('rolled back: golden prompt')")
    await http.post(
        "/fleet/models", json={"verb": "gate", "name": OTHER, "golden": []}, headers=OPS
    )
    shadow = {"verb": "shadow", "name": "smollm2", "model": OTHER, "share": 1.0}
    await http.post("/fleet/models", json=shadow, headers=OPS)
    await tab.until(f"{ROWS}[1].textContent.includes('smollm2: shadow 100 %')")
    await lanes.fleet.complete("hi", max_tokens=1, temperature=0)
    await tab.until(f"{ROWS}[1].textContent.includes('0 of 1 answers have the same tokens')")
    assert "smollm2: all" in await tab.js(f"{ROWS}[0].textContent")
    for width in (390, 1400):
        await tab.show_as(width, 800, "dark")
        assert await tab.js("document.documentElement.scrollWidth") <= width


@needs_browser
async def test_a_fleet_with_one_model_has_no_table_of_models(make_fleet, tab):
    fleet = await make_fleet({"decode-0": None})
    await tab.go(fleet.url)
    await tab.until("state.polls > 1")
    assert await tab.js("byId('models-section').hidden")
