"""Exchange of a router's leases with Redis, five times a second and when calls lack a lease."""

import asyncio
import logging
import time
from collections.abc import Callable
from time import monotonic_ns

from baton.registry.redis_store import RegistryUnavailableError
from baton.telemetry.tasks import BackgroundTasks
from baton.tenants.quotas import SharedQuotas
from baton.types.errors import (
    BudgetSpentError,
    InsufficientQuotaError,
    LimitTooSmallError,
    RateLimitError,
)
from router.tenants.metered_call import MeteredCall
from router.tenants.quota import EXCHANGE_NS, Never, QuotaReservation, Quotas, Wait

_LOG = logging.getLogger(__name__)

_PATIENCE_S = 0.5  # without an answer for so long, Redis is unavailable
_TRIES = 7
_AT_ONCE = 2  # tries without a pause: Redis may have to get a whole report first
_WORDS = {
    "rpm": "requests per minute",
    "tpm": "tokens per minute",
    "tpd": "tokens per day",
    "concurrent": "concurrent requests",
    "budget": "tokens per calendar month (UTC)",
}


class QuotaFeed:
    """Limits of tenants at one router, for calls.

    Args:
        source: Banks in Redis; None: the banks are here.
        on_refused: Receives the tenant and the limit of each refused call.
    """

    def __init__(
        self,
        router_id: str,
        source: SharedQuotas | None,
        routers: Callable[[], int],
        count_failure: Callable[[str], None],
        on_refused: Callable[[str, str], None] = lambda tenant, limit: None,
    ) -> None:
        self._on_refused = on_refused
        offset_ms = (time.time_ns() - monotonic_ns()) // 1_000_000
        self.quotas = Quotas(router_id, offset_ms)
        self._source = source
        self._routers = routers
        self._tasks = BackgroundTasks("quotas", count_failure)
        self._needed = asyncio.Event()
        self._round: asyncio.Future[None] | None = None
        if source is None:
            self.quotas.leave_redis(1)

    @property
    def is_degraded(self) -> bool:
        """State without Redis, in which this router has only its part of the limits."""
        return self._source is not None and self.quotas.routers > 0

    def start(self) -> None:
        """Start the exchange. Needs a running event loop."""
        source = self._source
        if source is not None:
            self._tasks.keep(lambda: self._run(source), "quotas")

    async def close(self) -> None:
        """Stop the exchange. Leases return by themselves."""
        await self._tasks.close()

    async def forget(self, tenant: str) -> None:
        """Remove the bank of a deleted tenant.

        Raises:
            RegistryUnavailableError: Redis does not answer.
        """
        if self._source is not None:
            await self._source.forget(tenant)

    async def reserve(
        self, tenant: str, prompt_tokens: int, choices: int, answer_tokens: int
    ) -> QuotaReservation | None:
        """Reserve what a call is expected to use; see `Quotas.take`.

        Only a call that needs more than this router has leased waits, for one exchange. If other
        routers have leased the rest without calls, it waits until they have returned it.

        Raises:
            RateLimitError: The tenant's limit is reached.
            BudgetSpentError: The tenant's budget of the month is spent.
            LimitTooSmallError: The call exceeds the limit alone.
        """
        call = (tenant, prompt_tokens, choices, answer_tokens)
        outcome = self.quotas.take(*call, monotonic_ns())
        tries = 0
        while isinstance(outcome, Wait) and outcome.asks and tries < _TRIES:
            await self._await_exchange(at_once=tries < _AT_ONCE)
            outcome = self.quotas.take(*call, monotonic_ns())
            tries += 1
        if isinstance(outcome, Never | Wait):
            self._on_refused(tenant, outcome.kind)
        if isinstance(outcome, Never):
            raise LimitTooSmallError(
                f"the request needs {outcome.amount} tokens; the limit of tenant {tenant} is "
                f"{outcome.limit} {_WORDS[outcome.kind]}; send a shorter prompt"
            )
        if isinstance(outcome, Wait) and outcome.kind == "budget" and not outcome.asks:
            raise BudgetSpentError(
                f"tenant {tenant} has used its budget of {outcome.limit} {_WORDS[outcome.kind]}; "
                "an operator can raise it with `baton tenants set`"
            )
        if isinstance(outcome, Wait):
            spent = outcome.kind == "tpd" and not outcome.asks
            kind = InsufficientQuotaError if spent else RateLimitError
            after_s = outcome.ns / 1e9
            raise kind(
                f"tenant {tenant} has reached its limit of {outcome.limit} {_WORDS[outcome.kind]}; "
                f"try again in {after_s:.1f} s",
                retry_after_s=after_s,
            )
        return outcome

    async def begun(self, call: MeteredCall) -> None:
        """Reserve the tokens of all prompts of a call, each once, and of all answers."""
        if not self.quotas.has_limits(call.tenant):
            return
        requests = call.requests
        answer_tokens = [
            0 if request.pooling or request.prompt_logprobs_only else request.sampling.max_tokens
            for request in requests
        ]
        call.reservation = await self.reserve(
            call.tenant,
            sum(len(request.prompt) for request in requests),
            sum(request.sampling.n for request in requests),
            max(answer_tokens),
        )

    def ended(self, call: MeteredCall) -> None:
        """Correct the reservation by the usage; a prompt that no worker received is free."""
        if call.reservation is not None:
            self.quotas.settle(
                call.reservation,
                sum(record.prompt_tokens for record in call.placed),
                sum(record.completion_tokens for record in call.placed),
                monotonic_ns(),
            )

    async def _await_exchange(self, *, at_once: bool) -> None:
        """Wait for the next exchange, which begins ``at_once`` or at its time."""
        if self.quotas.routers:
            self.quotas.exchange_here(monotonic_ns())
            return
        if self._round is None:
            self._round = asyncio.get_running_loop().create_future()
        if at_once:
            self._needed.set()
        await asyncio.wait([self._round], timeout=2 * _PATIENCE_S)

    async def _run(self, source: SharedQuotas) -> None:
        while True:
            try:
                async with asyncio.timeout(EXCHANGE_NS / 1e9):
                    await self._needed.wait()
            except TimeoutError:
                pass
            self._needed.clear()
            done = self._round
            self._round = None
            try:
                await self.exchange(source)
            finally:
                if done is not None:
                    done.set_result(None)

    async def exchange(self, source: SharedQuotas) -> None:
        """Exchange once. Without an answer this router has its part of the limits."""
        quotas = self.quotas
        try:
            async with asyncio.timeout(_PATIENCE_S):
                if quotas.routers:
                    await source.exchange({})
                    quotas.return_to_redis()
                    _LOG.info("leasing limits of tenants from Redis again")
                quotas.live_routers = self._routers()
                asks = quotas.asks(monotonic_ns())
                if asks:
                    quotas.granted(await source.exchange(asks), monotonic_ns())
        except (RegistryUnavailableError, TimeoutError) as error:
            if not quotas.routers:
                routers = self._routers()
                _LOG.warning("limits of tenants are split among routers=%d: %s", routers, error)
                quotas.leave_redis(routers)
            quotas.exchange_here(monotonic_ns())
