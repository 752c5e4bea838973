"""Lanes of a router: the models that it serves, each with its own workers and queue."""

from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Any

from baton.types.errors import InvalidRequestError, ModelNotFoundError
from baton.types.lanes import OF_VERSION, split_version
from baton.types.routes import NameRoute, RouteTable
from router.lane import Lane
from router.lanes.routes import Route, route
from router.routing.reports.request_reports import report_of
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.gateway import Gateway
from router.routing.workers.slot import WorkerSlot
from router.served_model import not_served


class LaneTable:
    """All lanes of one router. The first is the default of calls that name no model."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes

    @property
    def first(self) -> Lane:
        """The default lane."""
        return self._lanes[0]

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def names(self) -> list[str]:
        """Name of each model."""
        return [lane.model.names[0] for lane in self._lanes]

    def of(
        self, name: str, tenant: str | None = None, allowed: Sequence[str] | None = None
    ) -> Lane:
        """Return the lane of a model or adapter that a tenant may use; see `ServedModel.serves`.

        Raises:
            ModelNotFoundError: The name is not served, or not allowed.
        """
        for lane in self._lanes:
            if lane.model.serves(name, tenant, allowed):
                return lane
        raise self._unknown(name, tenant, allowed)

    def _unknown(
        self, name: str, tenant: str | None, allowed: Sequence[str] | None
    ) -> ModelNotFoundError:
        served = self.served_names(tenant, allowed)
        return not_served(name, served, 1 if len(self._lanes) == 1 else 16)

    def route(
        self,
        table: RouteTable,
        name: str,
        tenant: str,
        allowed: Sequence[str] | None,
        conversation: str,
        *,
        may_fall_back: bool = False,
    ) -> Route:
        """Return the model that answers a request; see `router.lanes.routes.route`.

        Raises:
            ModelNotFoundError: The name is not served, or not allowed.
        """
        chosen = route(
            table, name, tenant, lambda: conversation, self.is_ready, may_fall_back=may_fall_back
        )
        if name in table.names or (version := self._lowest_version(name)):
            if allowed is not None and name not in allowed:
                raise self._unknown(name, tenant, allowed)
            if name not in table.names:
                return Route(version, "lowest version", "", name)
        else:
            self.of(name, tenant, allowed)
        return chosen

    def entry(self, table: RouteTable, name: str) -> NameRoute | None:
        """Return the route of a name; None if it leads to the model of this name, or to none.

        Without a route, the name of models ``NAME@1``, ``NAME@2`` … leads to the lowest version.
        """
        version = self._lowest_version(name)
        return table.names.get(name) or (NameRoute(target=version) if version else None)

    def stems(self) -> list[str]:
        """Return the names of models ``NAME@3`` without their versions, each once."""
        stems = (split_version(name)[0] for name in self.names if OF_VERSION in name)
        return [stem for stem in dict.fromkeys(stems) if not self.serves(stem)]

    def _lowest_version(self, name: str) -> str:
        """Return the lowest version of a name that is no model itself; empty if it has none."""
        versions = [
            served
            for served in self.names
            if OF_VERSION in served and split_version(served)[0] == name
        ]
        lowest = min(versions, key=split_version, default="")
        return "" if lowest and self.serves(name) else lowest

    def serves(self, name: str) -> bool:
        """Return whether a model or adapter is served."""
        return any(lane.model.serves(name) for lane in self._lanes)

    def own_name(self, name: str) -> str:
        """Return the served name for an alias of a model in the fleet file."""
        return next((lane.model.names[0] for lane in self if name in lane.model.names), name)

    def is_ready(self, name: str) -> bool:
        """Return whether a model or adapter is served and has a worker that takes requests."""
        return any(
            bool(lane.gateway.workers.usable) or lane.gateway.starts_from_zero
            for lane in self._lanes
            if lane.model.serves(name)
        )

    def served_names(
        self, tenant: str | None = None, allowed: Sequence[str] | None = None
    ) -> list[str]:
        """Return the names that `of` accepts, by lane: its model's, then its adapters'."""
        return [name for lane in self for name in lane.model.served_names(tenant, allowed)]

    def base(self, name: str | None, param: str) -> Lane:
        """Return the lane with this name of a base model; None: the only lane.

        Raises:
            InvalidRequestError: There are several lanes, or none has this name.
        """
        if name is None and len(self._lanes) == 1:
            return self._lanes[0]
        for lane in self._lanes:
            if name in lane.model.names:
                return lane
        names = ", ".join(self.names)
        if name is None:
            raise InvalidRequestError.at(param, f"is required: this fleet serves {names}")
        raise InvalidRequestError.at(param, f"must be one of {names} (got {name[:200]!r})")

    @property
    def slots(self) -> list[WorkerSlot]:
        """Workers of all lanes; their ids differ."""
        return [slot for lane in self._lanes for slot in lane.gateway.workers]

    @property
    def in_flight(self) -> int:
        """Number of requests of all lanes that have not ended."""
        return sum(lane.gateway.in_flight for lane in self._lanes)

    @property
    def waiting(self) -> int:
        """Number of requests in the queues of all lanes."""
        return sum(lane.gateway.admission.waiting for lane in self._lanes)

    def newest_first(self) -> Iterator[ActiveRequest]:
        """Iterate over the kept requests of all lanes."""
        kept = (lane.gateway.kept.newest_first() for lane in self._lanes)
        return merge(*kept, key=lambda active: -active.request.arrived_ns)

    def find(self, request_id: str) -> tuple[Gateway, ActiveRequest] | None:
        """Return a kept request and its gateway."""
        for lane in self._lanes:
            if (active := lane.gateway.kept.get(request_id)) is not None:
                return lane.gateway, active
        return None

    def report(self, name: str, tenant: str | None) -> dict[str, Any] | None:
        """Return the report of a request; see `report_of`."""
        for lane in self._lanes:
            if (report := report_of(lane.gateway.kept, name, tenant)) is not None:
                return report
        return None

    def describe(self) -> dict[str, Any]:
        """Return the answer to ``GET /fleet``: the workers of all lanes with their models."""
        answers = [(lane.model, lane.gateway.workers.describe()) for lane in self._lanes]
        timings = (answer["emulated"] for _, answer in answers)
        return {
            "emulated": next(filter(None, timings), None),
            "workers": [
                {**worker, "model": model.names[0], "model_version": model.version}
                for model, answer in answers
                for worker in answer["workers"]
            ],
            "transfers": self.transfers(),
        }

    def transfers(self) -> dict[str, int]:
        """Return the sums of KV transfers of all lanes: ``count``, ``bytes``, ``failures``."""
        of_lanes = [lane.gateway.workers.transfers() for lane in self._lanes]
        return {
            kind: sum(sums[kind] for sums in of_lanes) for kind in ("count", "bytes", "failures")
        }
