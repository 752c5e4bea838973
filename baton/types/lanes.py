"""Names of lanes: the models of a fleet, each with its own workers, queue and placement.

In Redis and Ray a lane is a fleet of its own, named ``FLEET.LANE``. So no worker, block or command
of one lane is found for another one. Ids of its workers start with its name, which makes them
unique in the whole fleet.
"""

OF_LANE = "."
"""Separator of the fleet's name and the lane's. Names of fleets do not contain it."""


OF_VERSION = "@"
"""Separator of a model's name and the number of its version."""


def split_version(name: str) -> tuple[str, int]:
    """Return the name and the number of a version ``NAME@3``; the number of other names is 1."""
    stem, _, number = name.partition(OF_VERSION)
    return stem, int(number) if number.isdecimal() else 1


def lane_id(name: str) -> str:
    """Return a model's name as it appears in the ids of its workers, in Redis and in Ray."""
    return name.replace(".", "-").replace("_", "-").replace(OF_VERSION, "-")


def lane_fleet(fleet: str, name: str) -> str:
    """Return the name of the fleet that a lane is in Redis and Ray."""
    return f"{fleet}{OF_LANE}{lane_id(name)}"


def whole_fleet(fleet: str) -> str:
    """Return the name of the fleet that a lane belongs to; that of a fleet itself is unchanged."""
    return fleet.partition(OF_LANE)[0]


def lane_of(fleet: str) -> str:
    """Return the lane of a name ``FLEET.LANE``; empty for a fleet with one model."""
    return fleet.partition(OF_LANE)[2]


def worker_prefix(fleet: str) -> str:
    """Return the prefix of the ids of a lane's workers; empty for a fleet with one model."""
    lane = lane_of(fleet)
    return f"{lane}-" if lane else ""
