"""One call into a Ray cluster, as a process of its own: ``python -m fleet.pools.cluster_call``.

A process that is connected to Ray is ended by Ray's native code when the cluster's head is away
for long. So whoever must live on (the supervisor, and the router below it) asks a child like this
one, and watches the controller through Redis. The call comes as JSON on standard input, secrets
included; its reply is the last line of standard output.
"""

import os
import sys
from typing import Any, Literal

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.engine.parent import die_with_parent
from fleet.pools.checkup.findings import Checkup
from fleet.pools.nodes import CapacityError, plan
from fleet.pools.resources import ControllerSpec

REFUSED = 2  # exit code: the reply has a problem that another try would not solve


class ClusterCall(msgspec.Struct, frozen=True, kw_only=True):
    """What to do there.

    ``ensure`` has a controller run on this node; ``clean`` ends the fleet, also what has no
    controller; ``plan`` says where an empty cluster would take the replicas; ``examine`` looks at
    every node.
    """

    verb: Literal["ensure", "clean", "plan", "examine"]
    address: str
    config_json: str
    spec: ControllerSpec | None = None  # of `ensure`; its host is found out here


class ClusterReply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    problem: str = ""
    was_there: bool = False  # of `ensure`: the fleet, before the call
    address: str = ""  # of this node, as others reach it
    left: int = 0  # of `clean`: what no controller ended
    places: dict[str, str] = {}  # of `plan`: worker id -> its nodes, empty where there is no room
    checkup: Checkup | None = None  # of `examine`


def carry_out(call: ClusterCall) -> ClusterReply:
    """Do it, connected to the cluster until this process ends.

    Raises:
        CapacityError: There is no such cluster, or the fleet does not fit.
    """
    from fleet.pools import ray_runtime

    config = FleetConfig.model_validate_json(call.config_json)
    if call.verb == "clean":
        ray_runtime.attach(call.address)
        return ClusterReply(left=ray_runtime.clean(config.fleet))
    if call.verb == "examine":
        ray_runtime.attach(call.address)  # before `ray` is imported: it reads its token's mode then
        from fleet.pools.checkup.examine import examine

        return ClusterReply(checkup=examine(config))
    host = ray_runtime.connect(call.address, config)
    import ray

    if call.verb == "plan":
        from fleet.pools.placement import cluster_nodes

        places = plan(config, cluster_nodes())
        named = {
            worker_id: " + ".join(dict.fromkeys(f"{n.name} ({n.address})" for n in chosen))
            for worker_id, chosen in places.items()
        }
        return ClusterReply(places=named)
    if call.spec is None:
        raise ValueError("`ensure` needs a specification")
    spec = msgspec.structs.replace(call.spec, host=host, sealed=True)
    was_there = ray_runtime.Controller.ensure(config.fleet, spec)
    return ClusterReply(was_there=was_there, address=ray.util.get_node_ip_address())


def main() -> None:
    """Entry: one call, one reply."""
    die_with_parent()
    replies = os.dup(1)  # what Ray prints goes to standard error
    os.dup2(2, 1)
    call: Any = msgspec.json.decode(sys.stdin.buffer.read(), type=ClusterCall)
    code = 0
    try:
        reply = carry_out(call)
    except CapacityError as error:
        reply = ClusterReply(problem=str(error))
        code = REFUSED
    os.write(replies, msgspec.json.encode(reply) + b"\n")
    sys.stderr.flush()
    os._exit(code)  # an orderly goodbye to a head that has just gone would take a minute


if __name__ == "__main__":
    main()
