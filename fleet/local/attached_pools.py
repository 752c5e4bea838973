"""Workers of attached servers: one process, which is started again if it ends."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from baton.config.fleet_file import FleetConfig
from fleet.attached.settings import AttachedSettings
from fleet.attached.sources import ServerSource
from fleet.local.subprocesses import die_with_parent, end_child
from fleet.pools.resources import ControllerSpec, exit_reason
from fleet.private_logs import open_log

LOG = "attached"
_STOP_LIMIT_S = 3.0
_PAUSE_S = 2.0  # between two starts


class AttachedPools:
    """The process of all attached servers. All calls come from the main thread."""

    def __init__(self, config: FleetConfig, logs: Path) -> None:
        self._config = config
        self._logs = logs
        self._settings: AttachedSettings | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._slots: dict[str, list[dict[str, Any]]] = {}  # by lane; replaced as a whole
        self._news: list[str] = []
        self.adopted = False  # the process always starts anew
        self.address = "127.0.0.1"

    @property
    def refusal(self) -> str:
        """Needs that all servers lack; empty if one of them can be used, or may be later."""
        known = [slot for slot in self.slots() if slot["phase"] != "parked"]
        unfit = [slot["reason"] for slot in known if slot["phase"] == "unfit"]
        if not unfit or len(unfit) < len(known):
            return ""
        return f"{'; '.join(unfit)}; see {self._logs / LOG}.log"

    def start(self, spec: ControllerSpec) -> None:
        """Start the process.

        Raises:
            OSError, ValueError: The list of servers cannot be read.
        """
        for lane in self._config.lanes:
            if lane.pools.servers is not None:
                ServerSource(lane.pools.servers)
        self._launch(AttachedSettings(spec=msgspec.structs.replace(spec, host=self.address)))

    def _launch(self, settings: AttachedSettings) -> None:
        self._settings = settings
        with open_log(self._logs / f"{LOG}.log") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fleet.attached.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal must reach only the supervisor
                env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
                preexec_fn=die_with_parent(),
            )
        self._process = process
        self._started_s = time.monotonic()
        self._write(msgspec.json.encode(settings))
        threading.Thread(target=self._read, args=(process,), daemon=True, name="attached").start()

    def _write(self, line: bytes) -> None:
        stream = self._process.stdin if self._process is not None else None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and is started again
            if stream is not None:
                stream.write(line + b"\n")
                stream.flush()

    def change(self, config: FleetConfig, spec: ControllerSpec) -> None:
        """Apply another configuration. With other models the process is replaced."""
        same = [lane.model for lane in self._config.lanes] == [lane.model for lane in config.lanes]
        self._config = config
        if self._settings is not None:
            kept = msgspec.structs.replace(self._settings.spec, config_json=spec.config_json)
            self._settings = msgspec.structs.replace(self._settings, spec=kept)
        if same:
            self._write(spec.config_json.encode())
            return
        self._end()
        self._slots = {}
        self.start(spec)

    def retire(self) -> None:
        """Do nothing: the process of the new configuration has no other models."""

    def slots(self) -> list[dict[str, Any]]:
        """Return worker_id, phase, epoch and reason of each server that is known."""
        return [slot for lane in list(self._slots.values()) for slot in lane]

    def problem(self) -> str:
        """Return "": a process that has ended is started again."""
        return ""

    def news(self) -> list[str]:
        """Return the messages since the last call."""
        lines = self._news
        self._news = []
        return lines

    def answers(self) -> bool:
        """Return True; start the process again if it has ended."""
        process = self._process
        if process is None or process.poll() is None or self._settings is None:
            return True
        if time.monotonic() - self._started_s >= _PAUSE_S:
            ended = exit_reason(process.returncode)
            self._news.append(f"the process of attached servers has ended ({ended}): restarting")
            number = self._settings.number + 1
            self._launch(msgspec.structs.replace(self._settings, number=number))
        return True

    def stop(self, *, leave: bool) -> None:
        """End the process; ``leave`` is ignored, as it cannot outlive this one."""
        self._end()

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        end_child(process, _STOP_LIMIT_S)

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        """Read the lines of the process until it ends."""
        if process.stdout is None:
            return
        for line in process.stdout:
            if self._process is process:
                self._slots = {**self._slots, **msgspec.json.decode(line)}
        process.stdout.close()
