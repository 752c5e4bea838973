"""Fleet file that a running fleet follows: first the workers change, then the routers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from baton.config.fleet_file import FleetConfig
from fleet.local.attached_pools import AttachedPools
from fleet.local.changes import Changes, changes
from fleet.local.checks.preflight import describe_model
from fleet.local.cluster_pools import ClusterPools
from fleet.local.local_pools import LocalPools
from fleet.local.log_files import tail
from fleet.local.router_process import RouterProcesses
from fleet.pools.resources import ControllerSpec

Pools = LocalPools | ClusterPools | AttachedPools
"""Workers of a fleet, by the program that starts them."""


class FollowedFile:
    """Configuration that the fleet has, and the change to another one.

    Args:
        reread: Reads the file again; None: it cannot be read again.
    """

    def __init__(
        self,
        config: FleetConfig,
        reread: Callable[[], FleetConfig] | None,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.changing: Changes | None = None  # in progress
        self.changes_done = 0
        self.problem = ""  # why the last change failed
        self.awaits = ""  # what the change in progress waits for
        self._reread = reread
        self._say = say
        self._rolling = False  # routers are being replaced, the last step of a change
        self._routers_behind = False  # they failed to follow the last change

    def begin(self, pools: Pools | None, spec: Callable[[FleetConfig], ControllerSpec]) -> None:
        """Read the file and change the workers; ``spec`` returns what a controller is given.

        Raises:
            ValueError, RuntimeError, OSError: The file was rejected.
        """
        if self._reread is None or pools is None:
            raise ValueError("this supervisor cannot reread its file")
        new = self._reread()
        plan = changes(self.config, new)
        if plan.refused:
            raise ValueError("; ".join(plan.refused))
        for lane in new.lanes:
            if warning := describe_model(lane).warning:
                self._say(f"note: {warning}")
        for line in plan.lines:
            self._say(line)
        if plan.keys:
            pools.change(new, spec(new))
        self.config = new
        self._rolling = False  # routers replaced so far have read an older file
        earlier = self.changing
        late = self._routers_behind or (earlier is not None and earlier.router)
        self.changing = replace(plan, router=plan.router or late)

    def replace_routers(
        self, plan: Changes, routers: RouterProcesses | None, pools: Pools | None, logs: Path
    ) -> str | None:
        """Execute the last step of a change; return None until it is done, then a problem or ""."""
        if not plan.router or routers is None:
            return ""
        if not self._rolling:
            self._rolling = True
            routers.roll()
        if not routers.rolled or (plan.models_ended and not routers.settled):
            return None
        self._rolling = False
        failed = routers.roll_failed
        self._routers_behind = bool(failed)
        if failed:
            return f"{failed}; the present routers keep serving:\n{tail(logs, 'router')}"
        if plan.models_ended and pools is not None:
            pools.retire()  # no router uses their workers any more
        return ""

    def end(self, problem: str) -> None:
        """Note the end of a change, and why it failed, if it did."""
        self.changes_done += 1
        self.problem = problem
        self.awaits = ""

    def note_awaited(self, late_workers: str) -> bool:
        """Note what the change in progress waits for; return whether that is news."""
        awaited = late_workers or ("the new routers" if self._rolling else "")
        if self.changing is None or awaited == self.awaits:
            return False
        self.awaits = awaited
        return True
