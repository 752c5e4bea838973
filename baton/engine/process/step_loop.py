"""Step loop of an engine, in its own process, so that the network never delays a step.

    python -m baton.engine.process.step_loop CONTROL_FD POOL_FDS SETTINGS_JSON

``CONTROL_FD`` is one end of a Unix socket pair (see ``baton/engine/process/messages.py``).
``POOL_FDS`` is an empty memory file that becomes the KV pool, or a comma-separated list with one
for each rank; the shell maps the same files. The process ends after ``Stop``, when the other end of
the socket closes, or with exit code 1 and a ``Fatal`` report.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from baton.engine.core.plan import StepPlan
from baton.engine.core.sequence import EngineRequest
from baton.engine.parent import die_with_parent
from baton.engine.process import messages
from baton.engine.process.adapter_loader import AdapterLoader
from baton.engine.process.build import BuiltEngine, build_engine
from baton.engine.process.tier_copier import Erased, TierCopier
from baton.engine.process.tier_shelves import OtherBlocks
from baton.engine.sampling.grammars import GrammarCompileQueue
from baton.engine.settings import EngineSettings
from baton.types import events as ev
from baton.types.errors import BatonError, CancelledError_, NumericsError

_IDLE_S = 1.0
_ALIVE_S = 0.5  # time without a report after which the loop sends ``Alive``
_COMPILING_S = 0.002  # wait while a grammar compiles and nothing else is to be computed


class StepLoop:
    """Loop that receives commands, runs steps and sends reports."""

    def __init__(
        self, engine: BuiltEngine, settings: EngineSettings, control: socket.socket
    ) -> None:
        runner = engine.runner
        self._settings = settings
        self._control = control
        self._core = engine.core
        self._ranks = engine.ranks
        self._copier = engine.copier
        self._capabilities = runner.capabilities
        self._vocab_size = engine.info.vocab_size
        self._reader = messages.command_reader()
        self._adapters = AdapterLoader(settings.max_adapters, runner.adapters)
        self._grammar_queue: GrammarCompileQueue[messages.Submit] | None = (
            GrammarCompileQueue(runner.grammars) if runner.grammars is not None else None
        )
        # Requests that wait for a grammar or an adapter, and later commands for them.
        self._waiting: dict[str, list[messages.Command]] = {}
        self._erasures: dict[int, int] = {}  # number to blocks that the pool has forgotten
        self._stopping = False
        self._sent_s = 0.0

    def run(self) -> None:
        """Run steps until ``Stop`` or until the shell is gone."""
        while not self._stopping:
            self._order_copies()
            has_news = self._receive() | self._receive_copies()
            if time.monotonic() - self._sent_s > _ALIVE_S:
                self._send([messages.Alive()])
            self._submit_prepared()
            began_ns = time.monotonic_ns()
            plan = self._core.plan(began_ns)
            self._order_copies()
            if plan.rows:
                self._step(plan, began_ns)
            elif has_news or self._core.batch.events:
                self._send(self._core.take_events())
            else:
                self._core.check_when_idle()

    def _order_copies(self) -> None:
        if self._copier is not None:
            self._copier.order(self._core.take_copies(time.monotonic_ns()))

    def _receive_copies(self) -> bool:
        if self._copier is None:
            return False
        ended = self._copier.take()
        for done in ended:
            if isinstance(done, Erased):
                pool = self._erasures.pop(done.number)
                self._send([messages.BlocksErased({"pool": pool, **done.blocks})])
            elif isinstance(done, OtherBlocks):
                self._core.tiers.note_elsewhere(done.stored, done.removed)
            else:
                self._core.tiers.copied(done, time.monotonic_ns())
        return bool(ended)

    def _receive(self) -> bool:
        """Process commands; wait for news if there is nothing to compute."""
        busy = bool(self._core.batch.running)
        received = False
        watched: list[socket.socket | AdapterLoader | TierCopier] = [self._control, self._adapters]
        watched += self._ranks.sockets if self._ranks else ()
        if self._copier is not None:
            watched.append(self._copier)
        idle_s = _COMPILING_S if self._grammar_queue else _IDLE_S
        while ready := select.select(watched, [], [], 0 if busy or received else idle_s)[0]:
            if self._ranks is not None:
                self._ranks.check()  # ends the process when a rank has ended
            if self._control not in ready:
                return received  # an adapter load or a copy has ended
            data = self._control.recv(1 << 20)
            if not data:
                self._stopping = True  # the shell is gone
                return received
            for command in self._reader.feed(data):
                self._handle(command)
            received = True
        return received

    def _handle(self, command: messages.Command) -> None:
        scheduler = self._core.scheduler
        now_ns = time.monotonic_ns()
        match command:
            case messages.StopEngine():
                self._stopping = True
            case messages.EraseBlocks():
                self._forget(command.tags)
            case messages.Sleep():
                left = self._core.drop_cached()
                self._send([*self._core.take_events(), messages.Slept(left)])
            case messages.Submit():
                self._prepare(command)
            case messages.Cancel() if command.request_id in self._waiting and not command.choices:
                self._cancel_waiting(command)
            case _ if command.request_id in self._waiting:
                self._waiting[command.request_id].append(command)
            case messages.Bind():
                scheduler.bind(command.request_id, command.generation)
            case messages.Commit() | messages.ComputeLocally() if error := self._malformed(command):
                scheduler.fail(command.request_id, error)
            case messages.Commit():
                scheduler.commit(command.request_id, command.generation, command.first, now_ns)
            case messages.ComputeLocally():
                scheduler.compute_locally(command.request_id, command.first)
            case messages.PagesDrained():
                scheduler.drained(command.request_id, command.generation)
            case messages.Release():
                scheduler.release(command.request_id)
            case messages.Cancel():
                scheduler.cancel(command.request_id, command.choices, command.reason)
            case messages.Withdraw():
                scheduler.withdraw(command.request_id)

    def _forget(self, tags: frozenset[bytes]) -> None:
        blocks, number = self._core.forget(tags)
        if self._copier is None:
            self._send([messages.BlocksErased({"pool": blocks})])
            return
        self._order_copies()  # those before the erasure
        self._erasures[number] = blocks
        self._copier.erase(number, tags)

    def _prepare(self, command: messages.Submit) -> None:
        """Submit a request, or wait for its grammar and adapter beside the step loop."""
        refusal = self._malformed(command) or self._capabilities.refusal(command.spec)
        grammar = command.spec.params.grammar
        if refusal is not None:
            self._end(command.request_id, refusal)
        elif grammar and self._grammar_queue is not None:
            self._waiting[command.request_id] = []
            self._grammar_queue.add(command.request_id, command, grammar)
        elif command.spec.adapter is None:
            # It was sent while a step ran: that is a part of its time in the queue.
            self._submit(command, command.sent_ns or time.monotonic_ns())
        else:
            self._require_adapter(command)

    def _malformed(self, command: messages.Command) -> BatonError | None:
        return messages.malformed(command, self._vocab_size)

    def _require_adapter(self, command: messages.Submit) -> None:
        if command.spec.adapter is None:
            self._submit(command, time.monotonic_ns())
        else:
            self._waiting.setdefault(command.request_id, [])
            self._adapters.add(command)

    def _submit_prepared(self) -> None:
        for command, error in self._grammar_queue.take() if self._grammar_queue else ():
            if error is None:
                self._require_adapter(command)
            else:
                self._end(command.request_id, error)
        for command in self._adapters.advance():
            self._submit(command, time.monotonic_ns())
        self._send(self._adapters.take_events())

    def _cancel_waiting(self, command: messages.Cancel) -> None:
        if self._grammar_queue and self._grammar_queue.drop(command.request_id):
            self._end(command.request_id, CancelledError_(command.reason or "cancelled"))
        else:
            self._adapters.cancel(command)

    def _submit(self, command: messages.Submit, now_ns: int) -> None:
        prompt: list[int] = np.frombuffer(command.prompt_token_ids, dtype="<u4").tolist()
        request = EngineRequest(request_id=command.request_id, prompt=prompt, spec=command.spec)
        try:
            self._core.scheduler.submit(request, now_ns)
        except BatonError as error:
            self._end(command.request_id, error)
        for later in self._waiting.pop(command.request_id, ()):
            self._handle(later)

    def _end(self, request_id: str, error: BatonError) -> None:
        self._send([ev.Ended(request_id, error.code, error.message)])

    def _step(self, plan: StepPlan, began_ns: int) -> None:
        admissions = self._core.batch.take_events()
        if admissions:  # must precede the first Published of this step
            self._send(admissions)
        publications = self._core.publications(plan)
        total = self._core.geometry.num_layers

        def publish(done: int) -> None:
            due = [publication.on_layers_done(done, total) for publication in publications]
            self._send([published for published in due if published is not None])

        try:
            results = self._core.runner.execute(plan, publish if publications else None)
        except NumericsError as error:
            events = self._core.fail(plan, error)
            self._send([*events, messages.Sick(error.message, self._core.numerics_failures)])
            return
        now_ns = time.monotonic_ns()
        self._send(self._core.apply(plan, results, now_ns, now_ns - began_ns))

    def _send(self, reports: Sequence[messages.Report]) -> None:
        if reports:
            self._adapters.note(reports)
            for report in reports:
                if isinstance(report, ev.Ended):
                    self._waiting.pop(report.request_id, None)
                    if self._grammar_queue is not None:
                        self._grammar_queue.ended(report.request_id)
            self._control.sendall(messages.frame(reports))
            self._sent_s = time.monotonic()


def serve(
    settings: EngineSettings, control: socket.socket, pool_fd: int, own_fds: Sequence[int] = ()
) -> None:
    """Build the engine, report ``Ready``, then run steps until stopped.

    ``own_fds`` are the memory files of ranks 1 and up, if each has its own pool.
    """

    def report(what: messages.Report) -> None:
        control.sendall(messages.frame([what]))

    began_ns = time.monotonic_ns()
    engine = build_engine(
        settings, pool_fd, lambda what: report(messages.LoadProgress(what)), own_fds
    )
    report(
        messages.Ready(
            pid=os.getpid(),
            geometry=engine.runner.geometry,
            numerics_id=engine.info.numerics_id,
            weights_digest=engine.info.weights_digest,
            eos_token_ids=engine.runner.eos_token_ids,
            max_context_tokens=engine.info.max_context_tokens,
            threads=settings.threads * settings.tensor_parallel,
            load_s=(time.monotonic_ns() - began_ns) / 1e9,
            ranks=(os.getpid(), *engine.ranks.pids) if engine.ranks else (),
        )
    )
    try:
        StepLoop(engine, settings, control).run()
    finally:
        if engine.copier is not None:
            engine.copier.close()


def run(
    settings: EngineSettings, control: socket.socket, pool_fd: int, own_fds: Sequence[int] = ()
) -> int:
    """Run ``serve``, report its errors, and return the exit code."""
    try:
        serve(settings, control, pool_fd, own_fds)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the shell is gone
    except Exception as error:  # noqa: BLE001 - outermost handler: report, then exit with 1
        message = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"engine failed: {message}\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            control.sendall(messages.frame([messages.Fatal(message)]))
        return 1
    return 0


def main() -> None:
    """Run ``python -m baton.engine.process.step_loop``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the shell decides
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = msgspec.json.decode(sys.argv[3], type=EngineSettings)
    pool_fd, *own_fds = map(int, sys.argv[2].split(","))
    sys.exit(run(settings, control, pool_fd, own_fds))


if __name__ == "__main__":
    main()
