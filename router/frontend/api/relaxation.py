"""Check of a requested grammar; tools that are not strict are relaxed until it compiles."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from baton.text.grammar import GrammarKind
from baton.types.errors import GrammarError
from router.frontend.api.structured_output import RequestedGrammar
from router.frontend.api.tool_use.grammar import MOST_LEVEL, Levels, schema_at
from router.routing.checks.grammars import TIMED_OUT, GrammarChecker

_KEPT = 256
_MOST_FAULTY = 8

_Request = Callable[[Levels | None], Awaitable[RequestedGrammar | None]]


class CheckedGrammar(NamedTuple):
    """A grammar that compiles, and the request for it."""

    compiled: str
    requested: RequestedGrammar


class Relaxations:
    """Levels of the tools in requested grammars that did not compile, by their source."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker
        self._known: OrderedDict[int, Levels] = OrderedDict()  # by hash: a wrong hit only relaxes

    async def check(self, request: _Request, tenant: str) -> CheckedGrammar | None:
        """Return the grammar of a request, or None if it has none.

        Args:
            request: Function that returns the requested grammar with these levels.
            tenant: Sender.

        Raises:
            GrammarError: It does not compile, and no tool that is not strict is the reason.
            UnavailableError: Too many grammars of the tenant wait, or the process fails.
        """
        requested = await request(None)
        if requested is None:
            return None
        key = hash(requested.source)
        levels = self._known.get(key)
        trial = _Trial(self._checker, tenant)
        if levels is None:
            try:
                return CheckedGrammar(await trial.compiled(requested), requested)
            except GrammarError:
                if not requested.lenient:
                    raise
            levels = await trial.levels(requested)
        for least in range(0 if any(levels.values()) else 1, MOST_LEVEL + 1):
            raised = {t.name: max(levels.get(t.name, 0), least) for t in requested.lenient}
            again = await request(raised)
            if again is None:
                return None
            try:
                compiled = await trial.compiled(again)
            except GrammarError:
                if least == MOST_LEVEL:
                    raise
            else:
                if not trial.timed_out:
                    self._keep(key, raised)
                return CheckedGrammar(compiled, again)
        return None

    def _keep(self, key: int, levels: Levels) -> None:
        self._known[key] = levels
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)


class _Trial:
    """Trials of one request; ``timed_out``: one would perhaps succeed on a less busy machine."""

    def __init__(self, checker: GrammarChecker, tenant: str) -> None:
        self._checker = checker
        self._tenant = tenant
        self.timed_out = False

    async def compiled(self, requested: RequestedGrammar) -> str:
        return await self._checked(requested.param, requested.kind, requested.source)

    async def levels(self, requested: RequestedGrammar) -> Levels:
        """Return for each tool the lowest level that compiles by itself.

        After some that do not compile, which may take seconds each, the others get any object.
        """
        levels: dict[str, int] = {}
        for tool in requested.lenient:
            if len(levels) >= _MOST_FAULTY:
                levels[tool.name] = MOST_LEVEL
                continue
            for level in range(MOST_LEVEL):
                try:
                    await self._checked("tools", "json", schema_at(tool, level))
                except GrammarError:
                    levels[tool.name] = level + 1
                else:
                    break
        return levels

    async def _checked(self, param: str, kind: GrammarKind, source: str) -> str:
        try:
            return await self._checker.check(param, kind, source, self._tenant)
        except GrammarError as error:
            self.timed_out |= TIMED_OUT in error.message
            raise
