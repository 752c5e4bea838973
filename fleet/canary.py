"""A fixed prompt, asked again and again: does the engine still answer, and the same?"""

import asyncio
import secrets

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.engine.process.handle import EngineHandle
from baton.types import events as ev
from baton.types.params import SamplingParams
from baton.wire.tokens import pack_tokens

_PROMPT = tuple(range(100, 124))
_TOKENS = 4


class Canary:
    """Goes ahead of all requests.

    So an engine that does not even step for as long as a canary may take is hung, and one that
    answers NaN to it is sick.

    Args:
        engine: The engine.
        interval_s: Between two canaries, and how long one may take.
        exact: The answer must always be that of the first time.
    """

    def __init__(self, engine: EngineHandle, interval_s: float, *, exact: bool) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._exact = exact

    async def run(self) -> str:
        """Ask until something is wrong; returns what it is."""
        expected: tuple[int, ...] | None = None
        await asyncio.sleep(min(1.0, self._interval_s))
        while True:
            step_before = self._engine.load.step
            tokens, error = await self._ask()
            if error:
                return f"canary: {error}"
            if tokens is None and self._engine.load.step == step_before:
                return f"no engine step for {self._interval_s:.0f} s"
            if tokens is not None and self._exact:
                expected = expected or tokens
                if tokens != expected:
                    return f"canary: {tokens} instead of {expected}"
            await asyncio.sleep(self._interval_s)

    async def _ask(self) -> tuple[tuple[int, ...] | None, str]:
        """Tokens of one canary (None: not in time) and the error that it ended with."""
        tokens: list[int] = []
        ended = asyncio.get_running_loop().create_future()

        def on_report(report: object) -> None:
            if isinstance(report, ev.Tokens):
                tokens.extend(token.token for token in report.tokens)
            elif isinstance(report, ev.Ended) and not ended.done():
                ended.set_result(report.error_message)

        name = f"canary/{secrets.token_hex(8)}"
        command = messages.Submit(
            request_id=name,
            prompt_token_ids=pack_tokens(_PROMPT),
            spec=RequestSpec(
                kind=Kind.FULL,
                params=SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True),
                hash_seed=bytes(16),
                priority=-1,
                cacheable=False,
            ),
        )
        self._engine.submit(command, on_report, is_canary=True)
        try:
            async with asyncio.timeout(self._interval_s):
                error = await ended
        except TimeoutError:
            self._engine.client.send(messages.Cancel(name))
            return None, ""
        return tuple(tokens), error
