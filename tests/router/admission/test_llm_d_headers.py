"""llm-d's headers give a request a place, and never more rights than its key has.

Names: `pkg/epp/metadata/consts.go` of llm-d/llm-d-router at ebab6879.
"""

import asyncio

import pytest

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from tests.router.conftest import until
from tests.router.emulated_worker import Script

OBJECTIVE = "x-llm-d-inference-objective"
FAIRNESS = "x-llm-d-inference-fairness-id"
KEYS = {
    "key-of-one": ApiKeyConfig(tenant="one"),
    "key-of-two": ApiKeyConfig(tenant="two"),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator", min_priority=-100),
}


def of(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **headers}


@pytest.mark.parametrize("header", [OBJECTIVE, "x-gateway-inference-objective"])
async def test_an_objective_is_a_priority_within_the_rights_of_the_key(make_fleet, header):
    clients = ClientLimitsConfig(objectives={"urgent": -50, "batch": 10})
    fleet = await make_fleet({"decode-0": None}, api_keys=KEYS, clients=clients)
    for key, name, body, priority in (
        ("key-of-ops", "urgent", {}, -50),
        ("key-of-ops", "urgent", {"priority": -1}, -1),
        ("key-of-one", "batch", {}, 10),
        ("key-of-one", "urgent", {}, 0),  # its key allows no less
        ("key-of-one", "unknown", {}, 0),
        ("key-of-one", "-2147483648", {}, 0),
    ):
        assert (await fleet.chat(headers=of(key, **{header: name}), **body)).status_code == 200
        assert fleet.workers["decode-0"].submissions[-1].priority == priority, (key, name)


@pytest.mark.parametrize("header", [FAIRNESS, "x-gateway-inference-fairness-id"])
async def test_flows_take_turns_within_a_tenant_and_not_beyond_it(make_fleet, header):
    """Many flows are no more than one towards other tenants."""
    script = Script(step_s=0.001, prefill_s=1.0)
    fleet = await make_fleet({"decode-0": script}, api_keys=KEYS, window_requests=1)
    order: list[str] = []

    async def ask(name: str, key: str, flow: str) -> None:
        answer = await fleet.chat(headers=of(key, **{header: flow}), max_tokens=1)
        assert answer.status_code == 200
        order.append(name)

    calls = []
    for name, key, flow in (
        ("first", "key-of-one", "a"),
        *((f"a{number}", "key-of-one", "a") for number in range(3)),
        ("b", "key-of-one", "b"),
        ("odd", "key-of-one", "x" * 257),  # no flow
        ("two", "key-of-two", "c"),
    ):
        calls.append(asyncio.create_task(ask(name, key, flow)))
        in_all = len(calls)
        await until(lambda in_all=in_all: fleet.lane.gateway.in_flight == in_all)
    script.prefill_s = 0.01
    await asyncio.gather(*calls)
    assert order.index("b") < order.index("a1"), order
    assert order.index("two") <= 2, order
