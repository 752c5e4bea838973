"""Process for one call into a Ray cluster: ``python -m fleet.pools.cluster_call``.

If the cluster's head is down for long, Ray's native code ends every process that is connected to
it. The supervisor must survive that, so it makes calls in child processes and watches the
controller through Redis. The call is JSON on standard input, with secrets; the reply is the last
line of standard output.
"""

import os
import sys
from typing import Any, Literal

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.engine.parent import die_with_parent
from fleet.pools.checks.findings import Checkup
from fleet.pools.nodes import CapacityError, plan
from fleet.pools.resources import ControllerSpec

REFUSED = 2  # exit code: the reply has a problem


class ClusterCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call into a cluster.

    ``ensure`` starts or adopts the controller on this node; ``clean`` ends the fleet, with or
    without a controller; ``plan`` places the replicas on an empty cluster; ``examine`` checks every
    node.
    """

    verb: Literal["ensure", "clean", "plan", "examine"]
    address: str
    config_json: str
    spec: ControllerSpec | None = None  # of `ensure`; its host is set here


class ClusterReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a call."""

    problem: str = ""
    was_there: bool = False  # of `ensure`: whether the fleet existed before
    address: str = ""  # of this node, as others reach it
    left: int = 0  # of `clean`: leftovers that no controller ended
    places: dict[str, str] = {}  # of `plan`: worker id -> its nodes; empty without room
    checkup: Checkup | None = None  # of `examine`


def carry_out(call: ClusterCall) -> ClusterReply:
    """Execute a call; this process stays connected to the cluster until it ends.

    Raises:
        CapacityError: The cluster cannot be reached, or the fleet does not fit.
    """
    from fleet.pools import ray_runtime

    config = FleetConfig.model_validate_json(call.config_json)
    if call.verb == "clean":
        ray_runtime.attach(call.address)
        return ClusterReply(left=sum(ray_runtime.clean(lane.fleet) for lane in config.lanes))
    if call.verb == "examine":
        ray_runtime.attach(call.address)  # before the import of `ray`, which reads its auth mode
        from fleet.pools.checks.examine import examine

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
    was_there = ray_runtime.Controller.ensure(config.lanes[0].fleet, spec)
    return ClusterReply(was_there=was_there, address=ray.util.get_node_ip_address())


def main() -> None:
    """Read one call, execute it and write the reply."""
    die_with_parent()
    replies = os.dup(1)  # Ray's output goes to standard error
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
    os._exit(code)  # a regular exit takes a minute if the head has just died


if __name__ == "__main__":
    main()
