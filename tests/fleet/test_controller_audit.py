"""The controller's commands and the planner's turns are in the audit log."""

import json
from typing import Any

import pytest

from baton.registry.admin_commands import AdminCommand
from fleet.pools.admin_commands import CommandDesk
from fleet.pools.audited_commands import AuditedChanges
from fleet.pools.ray_controller import ControllerActor
from tests.fleet.test_ray_controller import controller

__all__ = ["controller"]


async def entries(controller: ControllerActor) -> list[dict[str, Any]]:
    found = [json.loads(raw) for raw in await controller._audit._inbox.waiting()]
    for entry in found:
        assert entry.pop("id") and entry.pop("time").endswith("+00:00")
    return found


async def test_commands_are_entries_with_their_caller_and_what_changed(
    controller: ControllerActor,
) -> None:
    arguments: list[tuple[str, dict]] = [
        ("ping", {}),
        ("plan", {}),
        ("scale", {"roles": "auto"}),
        ("scale", {"roles": "never"}),
    ]
    for number, (verb, given) in enumerate(arguments):
        order = AdminCommand(
            f"t{number}", verb, (), given, who="key 7k2m9x4qp1zc", source="10.0.0.1"
        )
        await controller._execute(order)
    await controller._execute(AdminCommand("t9", "drain", ("worker-0",)))
    by_key = {"who": "key 7k2m9x4qp1zc", "from": "10.0.0.1", "verb": "scale", "what": ""}
    auto = {"roles": "auto", "arguments": {"roles": "auto"}}
    never = {
        "arguments": {"roles": "never"},
        "refused": "roles cannot be 'never': use auto or hold",
    }
    found = await entries(controller)
    assert found[:2] == [
        {**by_key, "before": {"roles": "hold"}, "after": auto},
        {**by_key, "before": None, "after": never},
    ]
    assert found[2]["who"].startswith("baton at ") and found[2]["what"] == "worker-0"
    assert (found[2]["before"], found[2]["after"]) == ({"drained": []}, {"drained": ["worker-0"]})
    assert len(found) == 3


async def test_turns_of_the_planner_are_entries_with_their_reason(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = ["it is no longer ready", ""]

    async def change_role(_desk: CommandDesk, _worker_id: str, _role: str) -> str:
        return refusals.pop(0)

    monkeypatch.setattr(CommandDesk, "change_role", change_role)
    changes = AuditedChanges(controller._desk, controller._audit)
    turn = ("worker-0", "decode", "decode is 2 x too slow")
    assert await changes.change_role(*turn) and not await entries(controller)
    assert not await changes.change_role(*turn)
    assert await entries(controller) == [
        {
            "who": "planner",
            "from": "",
            "verb": "turn",
            "what": "worker-0",
            "before": {"role": "prefill"},
            "after": {"role": "decode", "why": "decode is 2 x too slow"},
        }
    ]


async def test_sizes_that_the_planner_chose_are_entries_with_their_reason(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = ["5 workers are outside of pools.auto: 1 to 4", ""]

    async def resize(_desk: CommandDesk, _sizes: dict) -> str:
        return refusals.pop(0)

    monkeypatch.setattr(CommandDesk, "resize", resize)
    changes = AuditedChanges(controller._desk, controller._audit)
    reason = "the load needs 1.90 + 0.20 workers"
    sizes = {"prefill": 2, "decode": 1}
    assert await changes.resize(sizes, reason) and not await entries(controller)
    before = {"pools": dict(controller._machine.wanted)}
    assert not await changes.resize(sizes, reason)
    (entry,) = await entries(controller)
    assert (entry["who"], entry["verb"], entry["before"]) == ("planner", "scale", before)
    assert entry["after"] == {"pools": sizes, "why": reason}
