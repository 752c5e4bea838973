"""A router with two models, whose workers have the same ids apart from their lane's name."""

from dataclasses import dataclass
from typing import Any

import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from router.served_model import ServedModel
from router.settings import LaneSettings
from router.sources import LaneSources
from tests.router.conftest import Fleet, record_of, until
from tests.router.emulated_worker import EmulatedWorker, Script
from tests.router.settings import OF_LANE
from tests.router.static_directory import StaticDirectory

OTHER = "other"
CONTEXT = 64  # of the other model
LETTERS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@dataclass
class TwoLanes:
    """Models ``smollm2`` and ``other``, with one worker each."""

    fleet: Fleet
    first: EmulatedWorker
    second: EmulatedWorker
    directory: StaticDirectory  # of the second model

    async def post(self, path: str, **body: Any) -> Any:
        return await self.fleet.http.post(path, json=body)


@pytest.fixture
async def two_lanes(make_fleet, model, artifact):
    async def make(
        script: Script | None = None,
        tables=None,
        first_tables=None,
        price=0.0,
        names=("smollm2", OTHER),
        other_slo=None,
        **more,
    ) -> TwoLanes:
        own, beside = names
        other = ServedModel(artifact, (beside,), max_context_tokens=CONTEXT, chat_template=LETTERS)
        served = model if own == "smollm2" else ServedModel(artifact, (own,))
        directory = StaticDirectory()
        settings = LaneSettings(
            fleet=f"local.{OTHER}",
            model=DEFAULT_MODEL,
            model_names=(beside,),
            price_per_hour=price,
            **{name: value for name, value in more.items() if name in OF_LANE} | {"slo": other_slo},
        )
        sources = LaneSources(directory, tables)
        others = [(settings, other, sources)]
        fleet = await make_fleet({}, served=served, others=others, tables=first_tables, **more)
        first = await fleet.add("decode-0")
        second = await EmulatedWorker("other-decode-0", "decode", script).start()
        fleet.workers["other-decode-0"] = second
        directory.put(record_of("other-decode-0", second.address))
        [_, lane] = fleet.router.lanes
        await until(lambda: lane.gateway.workers.usable)
        return TwoLanes(fleet, first, second, directory)

    return make
