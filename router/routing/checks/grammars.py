"""Compiles grammars before admission: off the event loop, with a time limit, one at a time.

Tenants take turns. A caller may leave; a compilation that runs is then finished, because its
verdict is kept.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

import msgspec

from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from baton.text.confined import frame
from baton.text.grammar import MAX_SOURCE_CHARACTERS, GrammarKind, Vocabulary
from baton.text.grammar_check import Question, TriedGrammar
from baton.types.errors import BatonError, GrammarError, UnavailableError
from router.routing.checks.fair_limit import FairLimit
from router.routing.checks.process import ConfinedProcess, ProcessEndedError

COMPILE_LIMIT_S = 2.0
_KEPT_VERDICTS = 256
_KEPT_CHARACTERS = 16 << 20  # in total
_EXPENSIVE = "too expensive: "
TIMED_OUT = f"{_EXPENSIVE}it takes over"
"""Part of the error of a grammar that may compile when the machine is less busy."""


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
        self._known: OrderedDict[Question, TriedGrammar] = OrderedDict()
        self._known_characters = 0
        self._process = ConfinedProcess("baton.text.grammar_check")
        self._limit = FairLimit(1, "grammars")
        self._tasks = BackgroundTasks(
            "grammars", lambda name: metrics.inc("baton_task_failures", task=name)
        )

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
        await self._process.kill()

    async def _in_turn(self, question: Question, tenant: str) -> TriedGrammar:
        await self._limit.acquire(tenant)
        verdict: asyncio.Future[TriedGrammar] = asyncio.get_running_loop().create_future()
        trial = self._tasks.spawn(self._try_into(question, verdict), "grammar")
        trial.add_done_callback(lambda _: self._tried(tenant, verdict))
        return await asyncio.shield(verdict)

    def _tried(self, tenant: str, verdict: asyncio.Future[TriedGrammar]) -> None:
        self._limit.release(tenant)
        verdict.cancel()  # no effect unless the compilation was cut short
        if not verdict.cancelled():
            verdict.exception()  # retrieved even if no caller waits any more

    async def _try_into(self, question: Question, verdict: asyncio.Future[TriedGrammar]) -> None:
        try:
            verdict.set_result(await self._try(question))
        except BatonError as error:
            verdict.set_exception(error)
        except Exception as error:
            verdict.set_exception(error)
            raise

    async def _try(self, question: Question) -> TriedGrammar:
        verdict = self._known.get(question)
        if verdict is not None:  # compiled while this one waited
            return verdict
        if not self._process.is_running:  # before the first grammar, or after one that ended it
            await self._start()
        began_s = monotonic()
        try:
            body = await self._process.ask(frame(question), self._limit_s)
            verdict = msgspec.msgpack.decode(body, type=TriedGrammar)
        except TimeoutError:  # not kept: the machine may have been busy
            return TriedGrammar(error=f"{TIMED_OUT} {self._limit_s:g} s to compile")
        except ProcessEndedError as error:
            if error.killed:
                raise UnavailableError("the compiler of grammars was killed; try again") from error
            verdict = TriedGrammar(
                error=f"{_EXPENSIVE}it is nested too deeply, or needs much memory"
            )
        self._metrics.observe("baton_grammar_compile_seconds", monotonic() - began_s)
        self._keep(question, verdict)
        return verdict

    def _keep(self, question: Question, verdict: TriedGrammar) -> None:
        self._known[question] = verdict
        self._known_characters += _characters(question, verdict)
        while len(self._known) > _KEPT_VERDICTS or self._known_characters > _KEPT_CHARACTERS:
            self._known_characters -= _characters(*self._known.popitem(last=False))

    def _refused(self, reason: str) -> None:
        self._metrics.inc("baton_grammar_refusals", reason=reason)

    async def _start(self) -> None:
        vocabulary = frame(await asyncio.to_thread(self._vocabulary))
        loaded = msgspec.msgpack.decode(await self._process.start(vocabulary), type=TriedGrammar)
        if loaded.error:
            await self._process.kill()
            raise GrammarError(loaded.error)


def _characters(question: Question, verdict: TriedGrammar) -> int:
    return len(question.source) + len(verdict.grammar) + len(verdict.error)
