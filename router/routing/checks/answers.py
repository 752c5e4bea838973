"""Checks of finished answers, in a process with limits of time and memory.

The checks run one at a time, and tenants take turns.
"""

import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from baton.text.answer_check import (
    MAX_CHARACTERS,
    TIME_LIMIT_S,
    UNCHECKED,
    AnswerFinding,
    Conformance,
    Match,
    Question,
    Redaction,
)
from baton.text.confined import frame
from baton.types.errors import UnavailableError
from router.routing.checks.fair_limit import FairLimit
from router.routing.checks.process import ConfinedProcess, ProcessEndedError
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.call import Call

_LOG = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 2.0
_KILL_AFTER_S = 4 * TIME_LIMIT_S
"""Time limit of a check that the process's own timer does not stop."""


class AnswerChecks:
    """Process that checks answers, and the order of its work.

    It starts with the first check, and again after a check that ended it.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._process = ConfinedProcess("baton.text.answer_check")
        self._limit = FairLimit(1, "checks of answers")
        self._tasks = BackgroundTasks(
            "answer checks", lambda name: metrics.inc("baton_task_failures", task=name)
        )

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run work that needs a check; `close` waits for it."""
        self._tasks.spawn(work, name)

    def closed(self, call: Call, active: ActiveRequest) -> None:
        """Count the schema violations of a complete response, after it was sent."""
        pairs = [pair for choice in active.record.choices for pair in choice.checks]
        if pairs:
            self.spawn(self._count_violations(pairs, call.tenant), "schema")

    async def _count_violations(self, pairs: Sequence[tuple[str, str]], tenant: str) -> None:
        """Count the keywords that an answer violates and no grammar enforces, each once."""
        keywords: set[str] = set()
        for schema, answer in pairs:
            if len(answer) > MAX_CHARACTERS:
                keywords.add(UNCHECKED)
                continue
            finding = await self._check(Conformance(schema, answer), tenant)
            keywords.update([UNCHECKED] if finding is None else finding)
        for keyword in sorted(keywords):
            self._metrics.inc("baton_schema_violations", keyword=keyword)

    async def problem(self, match: Match) -> str:
        """Return how an answer differs from its regular expression or schema; empty if it fits."""
        finding = await self._check(match, "")
        if finding is None:
            return f"the check of the text takes over {TIME_LIMIT_S:g} s, or too much memory"
        return next(iter(finding), "")

    async def redacted(
        self, rules: Mapping[str, str], texts: Sequence[str], tenant: str
    ) -> list[str] | None:
        """Return texts with ``[name]`` in place of matches; None if a rule takes too long."""
        return await self._check(Redaction(dict(rules), list(texts)), tenant)

    async def close(self) -> None:
        """Wait a moment for checks that run, and end the process."""
        await self._tasks.settle(_CLOSE_LIMIT_S)
        await self._tasks.close()
        await self._process.kill()

    async def _check(self, question: Question, tenant: str) -> list[str] | None:
        try:
            async with self._limit.place(tenant):
                if not self._process.is_running:
                    await self._process.start()
                body = await self._process.ask(frame(question), _KILL_AFTER_S)
        except (TimeoutError, ProcessEndedError, UnavailableError) as error:
            _LOG.warning("a check of an answer has no result: %s", error or type(error).__name__)
            return None
        finding = msgspec.msgpack.decode(body, type=AnswerFinding)
        return None if finding.is_over else finding.texts
