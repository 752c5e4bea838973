"""Table of drills, with the tolerated effects of each."""

from dataclasses import dataclass

from loadtest.drill import faults
from loadtest.drill.faults import Fault, bad_canary


@dataclass(frozen=True, kw_only=True)
class Drill:
    """Fault that is injected under load.

    Attributes:
        may_fail: Tolerate typed errors before the start of a response (never wrong tokens,
            silence or delays). A response that has started must be completed.
        of_capacity: Request rate as a multiple of the measured capacity; None for the base
            rate.
        fault_after_s: Seconds from the start of the load to the fault; the end of a load that
            is itself the fault.
        recovery_limit_s: Longest time in seconds from the fault until requests succeed again.
    """

    title: str  # description of the fault
    fault: Fault  # function that injects the fault, ``fault_after_s`` into the load
    may_fail: bool = False
    of_capacity: float | None = None
    mode: str | None = None  # ``x-baton-mode`` of this drill; None for the common one
    load_s: float = 20.0  # seconds over which requests are sent
    fault_after_s: float = 5.0
    abort_share: float = 0.0  # share of clients that disconnect
    recovery_limit_s: float = 120.0
    wrong_model: bool = False  # another model may answer until a second after the fault


DRILLS: dict[str, Drill] = {
    "kill-prefill": Drill(
        title="kill -9 of a prefill worker", fault=faults.kill("prefill"), may_fail=True
    ),
    "kill-decode": Drill(
        title="kill -9 of a decode worker", fault=faults.kill("decode"), may_fail=True
    ),
    "freeze-prefill": Drill(
        title="SIGSTOP of a prefill worker", fault=faults.freeze("prefill"), may_fail=True
    ),
    "freeze-decode": Drill(
        title="SIGSTOP of a decode worker", fault=faults.freeze("decode"), may_fail=True
    ),
    "cut-prefill": Drill(
        title="network of a prefill worker cut",
        fault=faults.bad_link("prefill", 10.0),
        may_fail=True,
    ),
    "cut-decode": Drill(
        title="network of a decode worker cut", fault=faults.bad_link("decode", 10.0), may_fail=True
    ),
    "slow-link": Drill(
        title="network of a prefill worker limited to 1 MB/s",
        fault=faults.bad_link("prefill", 15.0, 1_000_000),
        recovery_limit_s=60.0,
    ),
    "redis": Drill(title="kill -9 of Redis", fault=faults.kill_redis, recovery_limit_s=15.0),
    "abort-storm": Drill(
        title="three times the fleet's capacity, and 89 % of clients disconnect",
        fault=faults.only_traffic,
        of_capacity=3.0,
        fault_after_s=20.0,
        abort_share=0.89,
        recovery_limit_s=30.0,
    ),
    "overload": Drill(
        title="three times the fleet's capacity",
        fault=faults.only_traffic,
        may_fail=True,
        of_capacity=3.0,
        load_s=15.0,
        fault_after_s=15.0,
    ),
    "turn": Drill(
        title="a worker's role changes and changes back, three times",
        fault=faults.turn,
        mode="auto",  # a fleet of two has one role meanwhile
        load_s=25.0,
        recovery_limit_s=30.0,
    ),
    "bad-canary": Drill(
        title="a damaged copy of the model becomes a canary",
        fault=lambda scene: bad_canary(scene.fleet),
        mode="auto",
        load_s=30.0,
        recovery_limit_s=30.0,
        wrong_model=True,
    ),
    "rolling-restart": Drill(
        title="rolling restart of all workers",
        fault=faults.roll,
        mode="auto",  # a role without a ready worker cannot be forced
        load_s=60.0,
        recovery_limit_s=30.0,
    ),
}
