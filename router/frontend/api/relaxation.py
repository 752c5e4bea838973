"""Check of a requested grammar; tools that are not strict are relaxed until it compiles."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from baton.types.errors import GrammarError
from router.frontend.api.structured_output import RequestedGrammar
from router.frontend.api.tool_use.grammar import MOST_LEVEL, Levels, schema_at
from router.routing.requests.grammar_checker import GrammarChecker

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
        if levels is None:
            try:
                return CheckedGrammar(await self._compiled(requested, tenant), requested)
            except GrammarError:
                if not requested.lenient:
                    raise
            levels = await self._levels(requested, tenant)
        for least in range(0 if any(levels.values()) else 1, MOST_LEVEL + 1):
            raised = {t.name: max(levels.get(t.name, 0), least) for t in requested.lenient}
            again = await request(raised)
            if again is None:
                return None
            try:
                compiled = await self._compiled(again, tenant)
            except GrammarError:
                if least == MOST_LEVEL:
                    raise
            else:
                self._keep(key, raised)
                return CheckedGrammar(compiled, again)
        return None

    async def _compiled(self, requested: RequestedGrammar, tenant: str) -> str:
        return await self._checker.check(requested.param, requested.kind, requested.source, tenant)

    async def _levels(self, requested: RequestedGrammar, tenant: str) -> dict[str, int]:
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
                    await self._checker.check("tools", "json", schema_at(tool, level), tenant)
                except GrammarError:
                    levels[tool.name] = level + 1
                else:
                    break
        return levels

    def _keep(self, key: int, levels: Levels) -> None:
        self._known[key] = levels
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
