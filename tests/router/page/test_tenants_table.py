"""The table of tenants on the live page, in a real browser and with a real Redis."""

import pytest

from baton.config.clients import ApiKeyConfig
from baton.tenants.limits import Budget, Limits
from tests.registry.conftest import redis_server, registry
from tests.router.page.test_page import needs_browser

__all__ = ["redis_server", "registry"]

KEYS = {
    "key-of-team": ApiKeyConfig(tenant="team-9"),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator"),
}
ROWS = "[...document.querySelectorAll('#tenants tr')]"


@pytest.fixture
async def fleet(make_fleet, registry):
    return await make_fleet(
        {"decode-0": None},
        api_keys=KEYS,
        registry=registry,
    )


def use_policies(fleet, policies: dict[str, Limits]) -> None:
    """Use policies that Redis' older table does not replace."""
    fleet.router.policies.replace(policies)
    fleet.router.quotas.quotas.set_limits(policies)


async def open_with(tab, fleet, key: str) -> None:
    await tab.go(fleet.url)
    await tab.until("!byId('key-form').hidden")
    await tab.js(f"byId('key').value = '{key}'; byId('key-form').requestSubmit()")
    await tab.until("!byId('tenants-section').hidden")
    tab.problems.clear()  # calls without a key


@needs_browser
async def test_operators_see_use_by_limit_in_natural_order_at_any_width(fleet, tab):
    policies = {f"team-{n}": Limits(tpm=50_000) for n in (2, 10, 1)}
    policies["team-9"] = Limits(
        rpm=10, budget=Budget(tokens=60), weight=3, tpd=50_000_000, tpm=400_000, concurrent=64
    )
    policies["a-" + "very-long-name-" * 4] = Limits(rpm=5)
    use_policies(fleet, policies)
    answer = await fleet.complete(
        headers={"authorization": "Bearer key-of-team"}, max_tokens=90, ignore_eos=True
    )
    used = answer.json()["usage"]["total_tokens"]
    await tab.show_as(1600, 1000, "light")
    await open_with(tab, fleet, "key-of-ops")
    names = await tab.js(f"{ROWS}.map(row => row.cells[0].textContent)")
    assert names[1:] == ["team-1", "team-2", "team-9", "team-10"]
    await tab.until(f"{ROWS}[3].textContent.includes('1 of 10')")
    cells = await tab.js(f"[...{ROWS}[3].cells].map(cell => cell.textContent)")
    assert cells == [
        *("team-9", "1 of 10", f"{used} of 400K", f"{used} of 50M", f"{used} of 60", "0 of 64"),
        "3",
    ]
    assert await tab.js(f"{ROWS}[3].cells[4].className") == "spent"
    assert await tab.js(f"{ROWS}[3].cells[1].querySelector('progress').value") == 0.1
    assert await tab.js(f"{ROWS}[1].cells[1].textContent") == "–"
    widths = f"[...{ROWS}[3].cells].slice(1, 6).map(cell => cell.clientWidth)"
    for width, least in ((390, 150), (1600, 90)):
        await tab.show_as(width, 800, "dark")
        assert await tab.js("document.documentElement.scrollWidth") <= width
        fits = "const box = byId('tenants').parentElement.parentElement;"
        assert await tab.js(f"(() => {{ {fits} return box.scrollWidth <= box.clientWidth }})()")
        assert min(await tab.js(widths)) >= least, "no cell is squeezed"


@needs_browser
async def test_a_tenant_sees_itself_only(fleet, tab):
    use_policies(fleet, {"team-9": Limits(rpm=10), "other": Limits(rpm=1)})
    await open_with(tab, fleet, "key-of-team")
    assert await tab.js(f"{ROWS}.map(row => row.cells[0].textContent)") == ["team-9"]
    assert "other" not in await tab.js("document.body.textContent")
    tab.problems.clear()  # calls for operators


@needs_browser
async def test_the_number_of_rows_is_bounded_and_said(fleet, tab):
    use_policies(fleet, {f"team-{n}": Limits(rpm=10) for n in range(1000)})
    await open_with(tab, fleet, "key-of-ops")
    await tab.until(f"{ROWS}.length === 50")
    assert (await tab.js("byId('tenants-more').textContent")).startswith("50 of 1000 tenants.")
    use_policies(fleet, {})
    await tab.until("byId('tenants-section').hidden")
