"""`baton up`: starts a fleet in the foreground, supervises it and stops it.

    supervisor ── Redis (embedded)
               ├─ Ray daemons ── controller, workers ── engines
               └─ routers

The kernel ends every child with its parent, and every child has the run folder's name in its
environment, so nothing is left behind however the supervisor ends.

With `--address`, controller and workers run in an existing Ray cluster. They outlive a lost
supervisor, and the next one adopts them (`fleet.local.cluster_pools`).
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from baton.config.fleet_file import EMBEDDED, FleetConfig
from baton.telemetry.progress import Progress
from fleet.local import state as fleet_state
from fleet.local.attached_pools import AttachedPools
from fleet.local.audited import audit_here
from fleet.local.changes import keys_digest
from fleet.local.checks.machine_fit import missing_files, missing_resources
from fleet.local.checks.preflight import describe_model, notes
from fleet.local.cluster_pools import ClusterPools, RayCluster
from fleet.local.fleet_redis import FleetRedis
from fleet.local.fleet_token import KnownToken, fleet_token
from fleet.local.followed_file import FollowedFile, Pools
from fleet.local.handoff_watch import read_transfers, watch_handoffs
from fleet.local.http_trust import trusted
from fleet.local.local_pools import LocalPools
from fleet.local.log_files import OwnOutput, rotate, tail
from fleet.local.router_process import (
    RouterFailedError,
    RouterProcesses,
    group_folder,
    log_name,
    url_of,
)
from fleet.local.signals import StopRequestedError, StopSignal
from fleet.local.state import FleetState
from fleet.local.worker_phases import ShownWorkers, all_in_place, late_workers
from fleet.pools.resources import ControllerSpec
from fleet.process_key import ProcessKey

START_LIMIT_S = 600.0
_STOP_LIMIT_S = 14.0  # then everything left is killed
_ROUTER_STOP_S = 3.5
_POLL_S = 0.25
_CONTROLLER_POLL_S = 2.0
_CONTROLLER_LOST_S = 30.0
_LOOK_COUNTS_S = 10.0  # at most
_ANSWER_LIMIT_S = 3.0  # a starting router's socket accepts connections before it responds


class FleetError(RuntimeError):
    """The fleet cannot start or continue; the message has the reason and the fix."""


class RayLostError(FleetError):
    """Ray's daemons are gone. Exit with ``os._exit``: Ray's native code crashes otherwise."""


class Supervisor:
    """A fleet in the foreground, on a Ray cluster or else on a private Ray.

    ``reread`` reads a changed file.
    """

    def __init__(
        self,
        config: FleetConfig,
        config_file: Path,
        say: Callable[[str], None],
        cluster: RayCluster | None = None,
        *,
        reread: Callable[[], FleetConfig] | None = None,
    ) -> None:
        self._config_file = Path(os.path.abspath(config_file))  # noqa: PTH100 - keep links: mounts replace their targets
        self._progress = Progress(say)
        self._say = self._progress.say
        self._file = FollowedFile(config, reread, self._say)
        self._cluster = cluster
        self._rolls_failed = 0
        self._roll_problem = ""  # why new routers were given up
        self._shown = ShownWorkers(self._say)
        self._stop = StopSignal()
        self._token = KnownToken("", "")
        self._name = config.fleet  # of its state folder
        self._lock: fleet_state.FleetLock | None = None  # of the state folder
        self._logs = Path()
        self._redis = FleetRedis(config, self._say)
        self._end_handoff_watch: Callable[[], None] = lambda: None
        self._routers: RouterProcesses | None = None
        self._pools: Pools | None = None
        self._output: OwnOutput | None = None
        self._run_folder = Path()
        self._served = False  # the start is over, and in the audit log
        self._port = 0
        self.chats = True  # whether the first model has a chat template; set by the start

    @property
    def _config(self) -> FleetConfig:
        return self._file.config

    @property
    def url(self) -> str:
        """Router's URL for clients on this machine."""
        return url_of(self._config.clients.scheme, self._config.host, self._port)

    @property
    def announced_url(self) -> str:
        """Router's URL for clients elsewhere; a loopback URL if it listens on loopback only."""
        return url_of(self._config.clients.scheme, self._config.host, self._port, elsewhere=True)

    def run(self, on_ready: Callable[[], None]) -> None:
        """Start the fleet, call ``on_ready``, supervise until a stop request, and clean up.

        Raises:
            FleetError: The fleet could not start or continue; all of it has been stopped.
        """
        self._stop.install()
        self._stop.watch_make()
        try:
            with self._progress.shown():
                self._start()
            on_ready()
            self._audit("up")
            self._served = True
            self._stop.starting_done()
            if isinstance(self._pools, ClusterPools):
                self._pools.adopted = True  # from now on a fault here does not end the fleet
            self._watch()
        except StopRequestedError:
            self._say("start aborted by a signal")
        finally:
            self._stop.starting_done()
            try:
                self._take_down()
            finally:
                if self._output is not None:
                    self._output.release()

    def _start(self) -> None:
        count = self._config.pools.router_count
        self._routers = RouterProcesses(self._config.host, self._config.port, count)
        self._port = self._routers.port
        self._choose_name()
        self._logs = fleet_state.log_folder(self._config, self._name)
        self._token = fleet_token(self._name, self._config)
        missing = missing_files(self._config)
        if self._cluster is None and not self._config.is_attached:
            missing += missing_resources(self._config)
        if missing:
            raise FleetError("; ".join(missing))
        self._progress.awaited = "the files of the model"
        unchecked = [lane for lane in self._config.lanes if not self._describe(lane)]
        for note in notes(self._config):
            self._say(f"note: {note}")
        self._run_folder = fleet_state.new_run_folder()
        fleet_state.enter(self._run_folder)
        self._save_state()
        self._progress.awaited = "Redis"
        take_over = self._cluster.take_over if self._cluster is not None else None
        self._redis.start(self._run_folder, self._logs, self.announced_url, take_over)
        self._save_state()
        sums = fleet_state.state_folder(self._name) / "transfers.json"
        sums.unlink(missing_ok=True)  # an earlier fleet's sums; a restarted router resumes its own
        is_attached = self._config.is_attached
        self._progress.awaited = "the servers" if is_attached else "Ray and the controller"
        if self._cluster is None:  # a private Ray leaves the CPUs idle for half of its start
            self._start_routers(self._routers)
        self._start_workers()
        if self._cluster is not None:
            self._start_routers(self._routers)
        self._wait_until_ready(self._routers)
        self._end_handoff_watch = watch_handoffs(
            lambda: read_transfers(self.url, self._token.token, self._config.clients.certificate),
            self._say,
        )
        for lane in unchecked:  # the routers have loaded its files
            self._describe(lane)

    def _describe(self, lane: FleetConfig) -> bool:
        """Show what a model is; return whether it could be checked."""
        model = describe_model(lane)
        if lane.model_names == self._config.lanes[0].model_names:
            self.chats = model.chats
        shown = f"note: {model.warning}" if model.warning else f"model {lane.model}: {model.text}"
        self._say(shown)
        return not model.warning

    def _choose_name(self) -> None:
        fleet = self._config.fleet
        shared = self._config.redis != EMBEDDED or self._cluster is not None
        # Without shared Redis or Ray, a second fleet of the same file may run.
        names = (fleet,) if shared else (fleet, f"{fleet}-{self._port}")
        self._name, self._lock = fleet_state.claim_first(names, self._say)
        if self._lock is not None:
            return
        other = fleet_state.load(self._name)
        owner = f"pid {other.supervisor.pid}, {other.url}" if other is not None else "starting"
        raise FleetError(
            f"fleet {fleet} is already running ({owner})"
            + (", and this one would share its Redis or Ray" if shared else "")
            + ": stop it with `baton down`, or set another name with `fleet:`"
        )

    def _save_state(self) -> None:
        fleet_state.save(
            FleetState(
                name=self._name,
                fleet=self._config.fleet,
                supervisor=ProcessKey.own(),
                run_folder=str(self._run_folder),
                url=self.url,
                redis_url=self._redis.url,
                log_dir=str(self._logs),
                config_file=str(self._config_file),
                fleet_token=self._token.token,
                fleet_token_file=self._token.file,
                certificate=self._config.clients.certificate,
                tls=self._config.tls_files,
                on_cluster=self._cluster is not None,
                config_json=self._config.to_json(),
                keys_digest=keys_digest(self._config, str(self._run_folder)),
                changes_done=self._file.changes_done,
                change_problem=self._file.problem,
                change_awaits=self._file.awaits,
                rolls_failed=self._rolls_failed,
                roll_problem=self._roll_problem,
            )
        )

    def _start_workers(self) -> None:
        if self._config.is_attached:
            self._pools = AttachedPools(self._config, self._logs)
            self._pools.start(self._spec(self._config))
            return
        log = self._logs / "ray.log"
        self._output = OwnOutput(log)
        if self._cluster is None:
            self._say("starting Ray")
            self._pools = LocalPools(self._config, self._run_folder / "r")
        else:
            self._say(f"connecting to Ray at {self._cluster.address}")
            self._pools = ClusterPools(self._config, self._cluster.address, self._redis, log)
        self._pools.start(self._spec(self._config))
        self._stop.install()
        self._tell_news()

    def _spec(self, config: FleetConfig) -> ControllerSpec:
        token = self._token.for_workers(config, here=self._cluster is None)
        return ControllerSpec(
            config_json=config.to_json(),
            redis_url=self._redis.url,
            fleet_token=token.token,
            fleet_token_file=token.file,
            host="",  # set by the pools
            log_dir=str(self._logs),
        )

    def _start_routers(self, routers: RouterProcesses) -> None:
        secrets_by_environment = {
            **self._token.environment,
            "BATON_REDIS_URL": self._redis.url,
            "BATON_STATE_DIR": str(fleet_state.state_folder(self._name)),
            "BATON_AUDIT_FILE": str(fleet_state.audit_file(self._name)),
        }
        group = group_folder(self._run_folder)
        routers.start(self._config_file, secrets_by_environment, group, self._logs)

    def _wait_until_ready(self, routers: RouterProcesses) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        tls = trusted(self._config.clients.certificate)
        with httpx.Client(timeout=_ANSWER_LIMIT_S, trust_env=False, verify=tls) as client:
            while time.monotonic() < deadline:
                self._show_start()
                self._check_ray()
                for index, code in enumerate(routers.exit_codes):
                    if code is not None:
                        raise FleetError(
                            f"the router exited with code {code}:\n"
                            f"{tail(self._logs, log_name(index))}"
                        )
                if self._adopted or all_in_place(self._slots(), self._config):
                    with contextlib.suppress(httpx.TransportError):
                        if client.get(f"{self.url}/health/ready").status_code == 200:
                            return
                time.sleep(_POLL_S)
        raise FleetError(
            f"the fleet is not ready after {START_LIMIT_S:.0f} s; see `baton logs` ({self._logs})"
        )

    @property
    def _adopted(self) -> bool:
        """Return whether the fleet has served: then a failing worker must not end it."""
        return self._pools is not None and self._pools.adopted

    def _slots(self) -> list[dict[str, Any]]:
        return self._pools.slots() if self._pools is not None else []

    def _show_start(self) -> None:
        slots = self._slots()
        if isinstance(self._pools, AttachedPools) and (problem := self._pools.refusal):
            raise FleetError(problem)
        self._shown.show(slots)
        other = "the router" if slots else "the controller"
        self._progress.awaited = late_workers(slots) or other
        if (failed := self._shown.failed_start(slots)) is not None and not self._adopted:
            name, problem = failed
            raise FleetError(f"{problem}\n{tail(self._logs, name)}")

    def _watch(self) -> None:
        silent_s = 0.0  # without a response of the controller
        last_look_s = next_look_s = time.monotonic()
        while not self._stop.wait(_POLL_S):
            self._redis.keep()
            self._keep_routers()
            self._check_ray()
            self._follow_changes()
            if time.monotonic() >= next_look_s:
                responds = self._pools is not None and self._pools.answers()
                # a standstill of this process counts as one look: the controller stood still too
                silent_s += min(time.monotonic() - last_look_s, _LOOK_COUNTS_S)
                last_look_s = time.monotonic()
                if responds:
                    silent_s = 0.0
                    slots = self._slots()
                    self._shown.show(slots)
                    if self._file.note_awaited(late_workers(slots)):  # where `--reconcile` looks
                        self._note_state()
                next_look_s = time.monotonic() + _CONTROLLER_POLL_S
                rotate(self._logs)
            if silent_s > _CONTROLLER_LOST_S:
                raise FleetError(
                    f"Ray or the controller has not responded for {_CONTROLLER_LOST_S:.0f} s; see "
                    f"{self._logs / 'controller.log'}"
                )

    def _keep_routers(self) -> None:
        if self._routers is None:
            return
        if self._stop.take_new_routers():
            self._routers.roll()
        try:
            self._routers.keep(self._say)
        except RouterFailedError as error:
            raise FleetError(f"{error}:\n{tail(self._logs, error.log)}") from error
        failed = self._routers.roll_failed
        if failed and failed != self._roll_problem:
            self._rolls_failed += 1
            self._roll_problem = failed
            self._note_state()
        self._roll_problem = failed

    def _follow_changes(self) -> None:
        """Start a requested change; finish one whose workers are ready."""
        file = self._file
        if self._stop.take_change():
            try:
                file.begin(self._pools, self._spec)
            except (ValueError, RuntimeError, OSError) as error:  # a bad file must not end a fleet
                self._end_change(f"the file was rejected, the fleet is unchanged: {error}")
        elif file.changing is not None and all_in_place(self._slots(), self._config):
            problem = file.replace_routers(file.changing, self._routers, self._pools, self._logs)
            if problem is not None:
                file.changing = None
                self._end_change(problem)

    def _end_change(self, problem: str = "") -> None:
        self._say(problem or "the fleet matches its file")
        self._audit("file refused" if problem else "file applied", {"problem": problem or None})
        self._file.end(problem)
        self._note_state()

    def _note_state(self) -> None:
        try:
            self._save_state()
        except OSError as error:
            self._say(f"warning: cannot write the fleet's state: {error}; it keeps serving")

    def _audit(self, verb: str, more: Mapping[str, Any] | None = None) -> None:
        after = {"logs_text": self._config.logs.requests, **(more or {})}
        path = fleet_state.audit_file(self._name)
        audit_here(path, verb, str(self._config_file), say=self._say, after=after)

    def _check_ray(self) -> None:
        if self._pools is None:
            return
        self._tell_news()
        if (other := self._redis.taken_by) is not None:
            kept = "; its workers keep serving" if self._cluster is not None else ""
            raise FleetError(f"the fleet was taken over by {other}{kept}")
        if problem := self._pools.problem():
            raise RayLostError(f"{problem}; see {self._logs / 'ray.log'}")

    def _tell_news(self) -> None:
        for line in self._pools.news() if self._pools is not None else ():
            self._say(line)

    def _take_down(self) -> None:
        """Stop everything within `_STOP_LIMIT_S`, even if a part hangs."""
        if self._run_folder == Path():
            if self._routers is not None:
                self._routers.begin_stop()
            return  # nothing was started
        self._say("stopping")
        if self._served:
            self._audit("down")
        if self._routers is not None and self._served and "BATON_PICKER" in os.environ:
            self._routers.drain(lambda: self._stop.is_repeated)
        alarm = threading.Timer(_STOP_LIMIT_S, self._end_by_force)
        alarm.daemon = True
        alarm.start()
        with contextlib.ExitStack() as stack:  # runs every callback, whichever fails
            stack.callback(self._say, "stopped")
            stack.callback(alarm.cancel)
            stack.callback(fleet_state.forget, self._name)
            stack.callback(fleet_state.sweep, str(self._run_folder))
            stack.callback(self._redis.stop)
            stack.callback(self._end_handoff_watch)
            stack.callback(self._stop_workers)
            if self._routers is not None:  # first: their requests need the workers
                self._routers.begin_stop()
                self._routers.finish_stop(_ROUTER_STOP_S)

    def _stop_workers(self) -> None:
        leave = self._cluster is not None and self._cluster.leave
        if self._pools is not None:
            self._pools.stop(leave=leave or not self._stop.is_set)

    def _end_by_force(self) -> None:
        self._say("stopping takes too long: killing the remaining processes")
        fleet_state.sweep(str(self._run_folder))
        fleet_state.forget(self._name)
        os._exit(1)
