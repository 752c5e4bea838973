"""Fault of the drill `bad-canary`: a damaged copy of the model becomes a canary.

The fleet serves the model NAME and its damaged copy NAME-damaged (`loadtest.drill.damage`). First
the copy has golden prompts and must be refused. Then it answers half of the conversations, gets its
golden prompts, and must be rolled back within 20 of its requests or 10 s.
"""

import asyncio
import time
from typing import Any

from loadtest.drill.fleet import DrillError, DrillFaultError, FleetView
from loadtest.percent import percent

_SUFFIX = "-damaged"
_SHARE = 0.5
_TRAFFIC_S = 3.0
_LIMIT_S = 10.0
_LIMIT_REQUESTS = 20
_POLL_S = 0.05
_GOLDEN = ("Once upon a time, there was", "The capital of France is", "One, two, three, four,")


async def bad_canary(fleet: FleetView) -> str:
    """Canary the damaged copy twice; return what happened.

    Raises:
        DrillError: The fleet has no damaged copy of a model.
        DrillFaultError: The copy got requests, or was not rolled back in time.
    """
    name = await model_with_copy(fleet)
    copy = f"{name}{_SUFFIX}"
    try:
        return await _drill(fleet, name, copy)
    finally:
        await fleet.change_models({"verb": "remove", "name": name})
        await fleet.change_models({"verb": "gate", "name": copy, "golden": []})


async def model_with_copy(fleet: FleetView) -> str:
    """Return the name of a model that has a damaged copy.

    Raises:
        DrillError: There is none.
    """
    models: list[str] = [model["name"] for model in (await fleet.models())["models"]]
    pairs = [name for name in models if f"{name}{_SUFFIX}" in models]
    if not pairs:
        raise DrillError(
            f"the fleet serves no model NAME with a damaged copy NAME{_SUFFIX}: "
            "see `python -m loadtest.drill.damage --help`"
        )
    return pairs[0]


async def _drill(fleet: FleetView, name: str, copy: str) -> str:
    canary: dict[str, Any] = {"verb": "canary", "name": name, "model": copy, "share": _SHARE}
    golden = [
        {"name": f"prompt {index}", "prompt": text, "same_as": name}
        for index, text in enumerate(_GOLDEN)
    ]
    gate = {"verb": "gate", "name": copy}
    await fleet.change_models({**gate, "golden": golden})
    if not await fleet.change_models(canary):
        raise DrillFaultError(f"{copy} became a canary in spite of its golden prompts")
    await fleet.change_models({**gate, "golden": []})
    if problem := await fleet.change_models(canary):
        raise DrillError(f"canary without golden prompts: {problem}")
    await asyncio.sleep(_TRAFFIC_S)
    before = _requests(await fleet.models(), name)
    began_s = time.monotonic()
    await fleet.change_models({**gate, "golden": golden})
    after = before
    while True:
        state = await fleet.models()
        took_s = time.monotonic() - began_s
        entry = state["routes"].get(name, {})
        if entry.get("thrown_out"):
            break
        after = _requests(state, name)
        if took_s > _LIMIT_S and after - before > _LIMIT_REQUESTS:
            raise DrillFaultError(f"{copy} is still a canary after {took_s:.1f} s")
        await asyncio.sleep(_POLL_S)
    return (
        f"{copy} was refused before traffic; with {percent(_SHARE, 0)} of the traffic it was "
        f"rolled back after {took_s:.1f} s and {after - before} of its requests: {entry['reason']}"
    )


def _requests(state: dict[str, Any], name: str) -> int:
    gate = state["routes"].get(name, {}).get("gate")
    return int(gate["canary"]["requests"]) if gate else 0
