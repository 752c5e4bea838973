"""The process of all attached servers: ``python -m fleet.attached.process``, settings on its input.

It prints a line of JSON whenever the phase of a server changes, and ends after a
signal, once other workers have resumed the requests of its servers.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.config.network import host_name
from baton.engine import block_names
from baton.engine.llama_server.attached import LlamaServers
from baton.engine.parent import die_with_parent
from baton.engine.remote.attached import ServerKind
from baton.engine.vllm.attached import VllmServers
from baton.model.artifact import resolve_model
from baton.registry.admin_commands import AdminCommands, CommandReply
from baton.registry.connection import RoundTrips, beat
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import Intent, WorkerRecord, WorkerState, worker_name
from baton.telemetry.logs import set_up_logs
from baton.telemetry.process_memory import WORKER_OBJECTS, collect_rarely
from baton.telemetry.tasks import BackgroundTasks
from baton.types.lanes import worker_prefix
from baton.wire.process_end import exit_process
from fleet.attached.attachment import Attachment
from fleet.attached.settings import AttachedSettings
from fleet.attached.sources import ServerEntry, ServerSource
from fleet.pools.resources import worker_settings
from fleet.pools.slots import Launch
from fleet.worker.settings import WorkerSettings

_LOG = logging.getLogger(__name__)

POLL_S = 2.0
_LINE_BYTES = 16 << 20
_COMMANDS_S = 0.5
_RECORDS_S = 20.0  # between two writes of unchanged records, which expire
_TOGETHER_S = 0.25  # in which changes are written together
_SHARE_CHANGING = 4  # of the servers, one at least, may begin anew at once
_STATES: dict[str, WorkerState] = {"starting": "starting", "ready": "ready", "draining": "draining"}
_REASONS: dict[Intent, str] = {
    "park": "drained: the list of servers has `drain: true`",
    "leave": "it has left the list of servers",
}
_NO_COMMANDS = (
    "the workers of this fleet are attached servers: change their list, in which `drain: true` "
    "drains one"
)
_LIVES = 1000  # of a worker's life in one process, as epochs only grow


class LaneServers:
    """Servers of one model: they follow their source."""

    def __init__(
        self,
        config: FleetConfig,
        kind: ServerKind,
        source: ServerSource,
        settings: AttachedSettings,
        redis: RoundTrips,
        tasks: BackgroundTasks,
    ) -> None:
        self._config = config
        self._kind = kind
        self._source = source
        self._settings = settings
        self._tasks = tasks
        self._numbers: dict[str, int] = {}  # by the server's name; kept when it leaves
        self._lives: Counter[str] = Counter()  # of its workers, likewise
        self._past_epoch = settings.number * _LIVES
        self._listed: dict[str, ServerEntry] = {}
        self._attachments: dict[str, Attachment] = {}
        self._begin_anew: set[str] = set()  # changed ones, until they are ready
        self._redis = redis
        self._registry = Registry(settings.spec.redis_url, config.fleet, redis)
        self._changed = asyncio.Event()
        self._reported: list[tuple[str, WorkerRecord]] = []
        self._written: dict[str, WorkerRecord] = {}
        self._running: set[asyncio.Task[None]] = set()
        self.problem = ""

    def change(self, config: FleetConfig) -> None:
        """Follow another source. Other settings hold for workers that begin from now on.

        The same source stays, with the last good list of servers.
        """
        servers = config.pools.servers
        if servers is not None and servers != self._config.pools.servers:
            self._source = ServerSource(servers)
        self._config = config

    async def follow(self) -> None:
        """Read the source for ever, and attach and drain servers as it changes."""
        with contextlib.suppress(RegistryUnavailableError):  # of a process that was killed
            records = [one for each in await self._registry.records() for one in each.values()]
            self._past_epoch = max((self._past_epoch, *(one.epoch for one in records)))
        while True:
            before = self.problem
            try:
                entries = await self._source.read()
            except (OSError, ValueError) as error:
                self.problem = f"cannot read the list of servers: {error}"
            else:
                self.problem = "" if entries else "the list of servers is empty"
                self._apply(entries)
            if self.problem != before:
                _LOG.warning("%s", self.problem or "the list of servers is read again")
            self._report()
            await asyncio.sleep(POLL_S)

    async def refuse_commands(self) -> None:
        """Answer admin commands, which a controller executes in other fleets."""
        commands = AdminCommands(self._registry)
        while True:
            with contextlib.suppress(RegistryUnavailableError):
                while (command := await commands.take()) is not None:
                    problem = "" if command.verb == "ping" else _NO_COMMANDS
                    await commands.answer(command, CommandReply(problem))
            await beat(_COMMANDS_S)

    async def publish(self) -> None:
        """Write the state of all servers to the registry when it changes."""
        while True:
            self._changed.clear()
            is_written = await self._write([record for _, record in self._shown()])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECORDS_S if is_written else _COMMANDS_S):
                    await self._changed.wait()
            await asyncio.sleep(_TOGETHER_S)

    async def _write(self, records: Sequence[WorkerRecord]) -> bool:
        """Write these records, and for a while those of servers that have left; False: failed."""
        names = {record.worker_id for record in records}
        left = [record for name, record in self._written.items() if name not in names]
        gone = [msgspec.structs.replace(one, state="dead", intent="leave") for one in left]
        try:
            await self._registry.write_slots([*records, *gone])
        except RegistryUnavailableError:
            return False
        self._written = {record.worker_id: record for record in records}
        return True

    async def leave(self, *, at_once: bool) -> None:
        """Drain all servers, and wait until their workers have ended."""
        for one in self._attachments.values():
            one.leave(at_once=at_once)
        if self._running:
            await asyncio.wait(self._running)
        await self._write([])

    def _apply(self, entries: Sequence[ServerEntry]) -> None:
        hosts = Counter(host_name(entry.host) for entry in entries)
        listed = {entry.name: entry for entry in entries}
        ready = {name for name, one in self._attachments.items() if one.phase == "ready"}
        self._begin_anew = {name for name in self._begin_anew & listed.keys() if name not in ready}
        may_begin = max(len(listed) // _SHARE_CHANGING, 1) - len(self._begin_anew)
        for name, one in list(self._attachments.items()):
            if one.phase == "left":
                del self._attachments[name]
            elif (entry := listed.get(name)) is None or entry.drain:
                one.leave()
            elif not one.takes(entry) and (may_begin > 0 or not one.answers):
                may_begin -= 1
                self._begin_anew.add(name)
                one.leave()
        for name, entry in listed.items():
            self._numbers.setdefault(name, len(self._numbers))
            if name not in self._attachments and not entry.drain:
                self._attach(name, entry, alone=hosts[host_name(entry.host)] == 1)
        self._listed = listed

    def _attach(self, name: str, entry: ServerEntry, *, alone: bool) -> None:
        worker = partial(self._worker, name, entry)
        one = Attachment(entry, self._kind, worker, self._redis, alone, self._report)
        one.may_be_silent = partial(self._others_answer, one)
        self._attachments[name] = one
        running = self._tasks.spawn(one.run(), "attachment")
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def _others_answer(self, slow: Attachment) -> bool:
        """Return whether another server answers: if none does, the host or network is slow."""
        return any(one.answers for one in self._attachments.values() if one is not slow)

    def _worker_id(self, name: str) -> str:
        return worker_name(self._numbers[name], worker_prefix(self._config.fleet))

    def _epoch(self, name: str) -> int:
        return self._past_epoch + self._lives[name]

    def _worker(self, name: str, entry: ServerEntry) -> WorkerSettings:
        """Return the settings of a worker that begins."""
        self._lives[name] += 1
        launch = Launch(self._worker_id(name), entry.role, self._epoch(name))
        fields = worker_settings(self._config, launch, self._settings.spec)
        fields |= {"label": entry.label, "transports": ["grpc"]}
        return msgspec.convert(fields, WorkerSettings)

    def _shown(self) -> list[tuple[str, WorkerRecord]]:
        """Return phase and record of all servers of the list, and of those that have not left."""
        shown = []
        if self.problem:  # as that of a worker
            list_id = f"{worker_prefix(self._config.fleet)}list"
            of_list = WorkerRecord(worker_id=list_id, role="decode", state="dead", epoch=0)
            shown.append(("absent", msgspec.structs.replace(of_list, reason=self.problem)))
        for name in dict.fromkeys((*self._listed, *self._attachments)):
            one = self._attachments.get(name)
            listed = self._listed.get(name)
            entry = self._listed[name] if one is None else one.entry
            phase, reason = ("parked", "") if one is None else (one.phase, one.reason)
            intent: Intent = "leave" if listed is None else "park" if listed.drain else "serve"
            record = WorkerRecord(
                worker_id=self._worker_id(name),
                role=entry.role,
                state=_STATES.get(phase, "dead"),
                epoch=self._epoch(name),
                host=entry.label,
                reason=reason or _REASONS.get(intent, ""),
                intent=intent,
            )
            shown.append((phase, record))
        return shown

    def _report(self) -> None:
        """Print the state of all servers of this lane, as the supervisor shows it."""
        shown = self._shown()
        if shown == self._reported:
            return
        self._reported = shown
        self._changed.set()
        slots = [
            {"worker_id": one.worker_id, "phase": phase, "epoch": one.epoch, "reason": one.reason}
            for phase, one in shown
        ]
        line = memoryview(msgspec.json.encode({self._config.fleet: slots}) + b"\n")
        while line:  # without a buffer, a signal ends a write of Python's stream before its end
            line = line[os.write(sys.stdout.fileno(), line) :]


async def serve(settings: AttachedSettings) -> int:
    """Attach the servers of all lanes until a signal; a second one does not wait for requests."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    hurried: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
        elif not hurried.done():
            hurried.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    tasks = BackgroundTasks("attached servers")
    config = FleetConfig.model_validate_json(settings.spec.config_json)
    redis = RoundTrips(settings.spec.redis_url, joins=True)
    lanes = [await _lane(one, settings, redis, tasks) for one in config.lanes]
    collect_rarely(WORKER_OBJECTS)
    following = [tasks.keep(one.follow, "servers") for one in lanes]
    following += [tasks.keep(one.refuse_commands, "admin commands") for one in lanes]
    following += [tasks.keep(one.publish, "records") for one in lanes]
    following.append(tasks.keep(partial(_follow_file, lanes), "configuration"))
    await stopping.wait()
    for task in following:
        task.cancel()
    leaving = [tasks.spawn(one.leave(at_once=False), "leave") for one in lanes]
    await asyncio.wait((*leaving, hurried), return_when=asyncio.FIRST_COMPLETED)
    for one in lanes:
        await one.leave(at_once=hurried.done())
    await tasks.close()
    await redis.close()
    return 0


async def _follow_file(lanes: Sequence[LaneServers]) -> None:
    """Apply each configuration that arrives as a line of the input."""
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    while line := await reader.readline():
        config = FleetConfig.model_validate_json(line)
        for lane, one in zip(lanes, config.lanes, strict=True):
            lane.change(one)


async def _lane(
    config: FleetConfig, settings: AttachedSettings, redis: RoundTrips, tasks: BackgroundTasks
) -> LaneServers:
    servers = config.pools.servers
    if servers is None:
        raise ValueError(f"{config.fleet}: there are no `servers`")
    kind = await asyncio.get_running_loop().run_in_executor(None, kind_of, config)
    return LaneServers(config, kind, ServerSource(servers), settings, redis, tasks)


def kind_of(config: FleetConfig) -> ServerKind:
    """Return the servers of a lane's model, whose files are read without weights. Blocks.

    Raises:
        ModelError: The model is missing.
    """
    find = partial(resolve_model, config.model, allow_unsupported=True, with_weights=False)
    if config.pools.engine.external == "llama-server":
        return LlamaServers(find())
    reference = config.model.removeprefix("hub:").partition("@")[0]
    adapters = config.adapters.max_loaded * config.wants_adapters
    return VllmServers((*config.model_names, reference), find(), adapters, config.pools.hand_off)


def _first_line() -> bytes:
    """Read a line and no byte behind it."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line


def main() -> None:
    """Run this module with settings, secrets included, as a line of JSON on standard input.

    Further lines are changed configurations.
    """
    die_with_parent()
    settings = msgspec.json.decode(_first_line(), type=AttachedSettings)
    config = FleetConfig.model_validate_json(settings.spec.config_json)
    set_up_logs(config.logs.format, fields={"fleet": config.fleet})
    block_names.load()  # it may have to be compiled
    exit_process(asyncio.run(serve(settings)))


if __name__ == "__main__":
    main()
