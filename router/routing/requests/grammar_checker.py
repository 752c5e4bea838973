"""Compiles grammars before admission: off the event loop, with a time limit, one at a time.

Only one grammar of each tenant waits for the process, so tenants take turns: many expensive
grammars of one tenant delay another's by one. A caller may leave; a compilation that runs is then
finished, because its verdict is kept.
"""

import asyncio
import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from baton.text.grammar import MAX_SOURCE_CHARACTERS, GrammarKind, Vocabulary
from baton.text.grammar_check import LENGTH, Question, Verdict, frame
from baton.types.errors import BatonError, GrammarError, UnavailableError

COMPILE_LIMIT_S = 2.0
START_LIMIT_S = 60.0
_KEPT_VERDICTS = 256
_KEPT_CHARACTERS = 16 << 20  # in total
_MAX_WAITING = 256  # per tenant
_EXPENSIVE = "too expensive: "
TIMED_OUT = f"{_EXPENSIVE}it takes over"
"""Part of the error of a grammar that may compile when the machine is less busy."""


@dataclass(slots=True)
class _TenantQueue:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class GrammarChecker:
    """Process that compiles new grammars, and verdicts on earlier ones.

    It starts with the first grammar, and again after a grammar that killed it.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        metrics: Metrics,
        limit_s: float = COMPILE_LIMIT_S,
    ) -> None:
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._limit_s = limit_s
        self._known: OrderedDict[Question, Verdict] = OrderedDict()
        self._known_characters = 0
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._tasks = BackgroundTasks(
            "grammars", lambda name: metrics.inc("baton_task_failures", task=name)
        )
        self._lines: dict[str, _TenantQueue] = {}  # of tenants that wait

    async def check(
        self, param: str, kind: GrammarKind, source: str, tenant: str = "default"
    ) -> str:
        """Return the llguidance grammar of a client's ``source``, given in field ``param``.

        Raises:
            GrammarError: The grammar is invalid or too expensive.
            UnavailableError: Too many grammars of the tenant wait, or the process fails.
        """
        if len(source) > MAX_SOURCE_CHARACTERS:
            self._refused("too_large")
            raise GrammarError(
                f"{param}: has {len(source)} characters, the limit is {MAX_SOURCE_CHARACTERS}",
                param=param,
            )
        question = Question(kind, source)
        verdict = self._known.get(question)
        if verdict is None:
            verdict = await self._in_turn(question, tenant)
        else:
            self._known.move_to_end(question)
        if verdict.error:
            self._refused("too_expensive" if verdict.error.startswith(_EXPENSIVE) else "invalid")
            raise GrammarError(f"{param}: {verdict.error}", param=param)
        return verdict.grammar

    async def close(self) -> None:
        """End the compiler process."""
        await self._tasks.close()
        await self._kill()

    async def _in_turn(self, question: Question, tenant: str) -> Verdict:
        line = self._lines.setdefault(tenant, _TenantQueue())
        if line.waiting >= _MAX_WAITING:
            raise UnavailableError(f"{line.waiting} grammars are waiting to be compiled")
        line.waiting += 1
        try:
            async with line.lock:
                await self._turn.acquire()
                verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
                trial = self._tasks.spawn(self._try_into(question, verdict), "grammar")
                trial.add_done_callback(lambda _: self._tried(verdict))
                return await asyncio.shield(verdict)
        finally:
            line.waiting -= 1
            if not line.waiting:
                del self._lines[tenant]

    def _tried(self, verdict: asyncio.Future[Verdict]) -> None:
        self._turn.release()
        verdict.cancel()  # no effect unless the compilation was cut short
        if not verdict.cancelled():
            verdict.exception()  # retrieved even if no caller waits any more

    async def _try_into(self, question: Question, verdict: asyncio.Future[Verdict]) -> None:
        try:
            verdict.set_result(await self._try(question))
        except BatonError as error:
            verdict.set_exception(error)
        except Exception as error:
            verdict.set_exception(error)
            raise

    async def _try(self, question: Question) -> Verdict:
        verdict = self._known.get(question)
        if verdict is not None:  # compiled while this one waited
            return verdict
        if self._process is not None and _is_gone(self._process):
            await self._kill()  # it died between two grammars: neither is to blame
        process = self._process or await self._start()
        began_s = monotonic()
        try:
            async with asyncio.timeout(self._limit_s):
                verdict = await self._ask(process, frame(question))
        except TimeoutError:  # not kept: the machine may have been busy
            await self._kill()
            return Verdict(error=f"{TIMED_OUT} {self._limit_s:g} s to compile")
        except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError):
            await self._kill()
            verdict = Verdict(error=f"{_EXPENSIVE}it is nested too deeply, or needs much memory")
        except asyncio.CancelledError:
            await self._kill()  # its reply would be taken for that to the next grammar
            raise
        self._metrics.observe("baton_grammar_compile_seconds", monotonic() - began_s)
        self._keep(question, verdict)
        return verdict

    def _keep(self, question: Question, verdict: Verdict) -> None:
        self._known[question] = verdict
        self._known_characters += _characters(question, verdict)
        while len(self._known) > _KEPT_VERDICTS or self._known_characters > _KEPT_CHARACTERS:
            self._known_characters -= _characters(*self._known.popitem(last=False))

    def _refused(self, reason: str) -> None:
        self._metrics.inc("baton_grammar_refusals", reason=reason)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "baton.text.grammar_check",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._process = process
        try:
            vocabulary = frame(await asyncio.to_thread(self._vocabulary))
            async with asyncio.timeout(START_LIMIT_S):
                loaded = await self._ask(process, vocabulary)
        except (OSError, EOFError) as error:
            await self._kill()
            raise UnavailableError("grammars cannot be compiled: the process fails") from error
        except BaseException:
            await self._kill()
            raise
        if loaded.error:
            await self._kill()
            raise GrammarError(loaded.error)
        return process

    async def _ask(self, process: asyncio.subprocess.Process, message: bytes) -> Verdict:
        if process.stdin is None or process.stdout is None or process.stdin.is_closing():
            raise BrokenPipeError  # uvloop would raise a RuntimeError
        process.stdin.write(message)
        await process.stdin.drain()
        (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Verdict)

    async def _kill(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _characters(question: Question, verdict: Verdict) -> int:
    return len(question.source) + len(verdict.grammar) + len(verdict.error)


def _is_gone(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is not None or process.stdin is None or process.stdin.is_closing()
