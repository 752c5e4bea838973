"""Which drills there are, and what each may cost."""

from dataclasses import dataclass

from loadtest.drill import faults
from loadtest.drill.faults import Fault


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One fault under load.

    Args:
        title: What it asks.
        fault: What is done, ``fault_after_s`` into the load.
        may_fail: Requests may end with typed errors before their answer has begun (never wrong,
            silent or late); one that has begun goes on.
        of_capacity: Sent at so many times the rate that the fleet was seen to serve; None: at the
            base rate.
        mode: ``x-baton-mode`` of this drill; None: what was chosen for all.
        load_s: How long requests are sent.
        fault_after_s: See ``fault``; the end of a load that is itself the fault.
        abort_share: This share of clients hangs up.
        recovery_limit_s: From the fault to answers again.
    """

    title: str
    fault: Fault
    may_fail: bool = False
    of_capacity: float | None = None
    mode: str | None = None
    load_s: float = 20.0
    fault_after_s: float = 5.0
    abort_share: float = 0.0
    recovery_limit_s: float = 120.0


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
        title="a prefill worker's network is cut",
        fault=faults.bad_link("prefill", 10.0),
        may_fail=True,
    ),
    "cut-decode": Drill(
        title="a decode worker's network is cut",
        fault=faults.bad_link("decode", 10.0),
        may_fail=True,
    ),
    "slow-link": Drill(
        title="a prefill worker's network lets 1 MB/s through",
        fault=faults.bad_link("prefill", 15.0, 1_000_000),
        recovery_limit_s=60.0,
    ),
    "redis": Drill(title="kill -9 of Redis", fault=faults.kill_redis, recovery_limit_s=15.0),
    "abort-storm": Drill(
        title="three times what the fleet can serve, and 89 % of clients hang up",
        fault=faults.only_traffic,
        of_capacity=3.0,
        fault_after_s=20.0,
        abort_share=0.89,
        recovery_limit_s=30.0,
    ),
    "overload": Drill(
        title="three times what the fleet can serve",
        fault=faults.only_traffic,
        may_fail=True,
        of_capacity=3.0,
        load_s=15.0,
        fault_after_s=15.0,
    ),
    "rolling-restart": Drill(
        title="every worker restarted, one after another",
        fault=faults.roll,
        mode="auto",  # a role without a ready worker cannot be asked for by force
        load_s=60.0,
        recovery_limit_s=30.0,
    ),
}
