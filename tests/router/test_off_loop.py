"""Large bodies of one tenant delay another tenant's by one piece of work."""

import asyncio
import threading
import time

import pytest

from baton.types.errors import UnavailableError
from router.frontend import off_loop
from router.frontend.off_loop import TENANT, LargeWork, Shared


async def test_tenants_take_turns_in_the_threads() -> None:
    large, may_end, order = LargeWork(), threading.Event(), []

    def work(name: str) -> None:
        order.append(name)
        may_end.wait(20)

    async def call(tenant: str) -> None:
        TENANT.set(tenant)
        await large.run(1 << 20, lambda: work(tenant))

    busy = [asyncio.create_task(call("busy")) for _ in range(50)]
    await asyncio.sleep(0.05)
    other = asyncio.create_task(call("other"))
    await asyncio.sleep(0.05)
    running = len(order)
    may_end.set()
    await asyncio.gather(*busy, other)
    assert order.index("other") <= running + 1
    assert len(order) == 51


async def test_one_tenant_leaves_a_thread_to_the_others() -> None:
    large, may_end = LargeWork(), threading.Event()

    async def call(tenant: str, wait: bool) -> None:
        TENANT.set(tenant)
        await large.run(1 << 20, lambda: wait and may_end.wait(20))

    busy = [asyncio.create_task(call("busy", True)) for _ in range(50)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        await call("other", False)
    may_end.set()
    await asyncio.gather(*busy)
    assert not large._limits.get()._tenants


async def test_much_work_of_a_tenant_is_refused_and_another_tenants_is_not() -> None:
    large, may_end = LargeWork(), threading.Event()

    async def call(tenant: str) -> str:
        TENANT.set(tenant)
        return await large.run(1 << 20, lambda: may_end.wait(20) and tenant)

    busy = [asyncio.create_task(call("busy")) for _ in range(300)]
    await asyncio.sleep(0.05)
    other = asyncio.create_task(call("other"))
    await asyncio.sleep(0.05)
    may_end.set()
    results = await asyncio.gather(*busy, return_exceptions=True)
    refused = [result for result in results if isinstance(result, UnavailableError)]
    assert 0 < len(refused) <= 300 - 256
    assert await other == "other"


async def test_a_caller_that_leaves_frees_no_thread_that_works() -> None:
    large, may_end, running = LargeWork(), threading.Event(), []

    def work() -> None:
        running.append(1)
        may_end.wait(20)
        running.pop()

    callers = [asyncio.create_task(large.run(1 << 20, work)) for _ in range(40)]
    await asyncio.sleep(0.05)
    most = len(running)
    for caller in callers[:20]:
        caller.cancel()
    await asyncio.sleep(0.05)
    assert len(running) == most
    may_end.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 20
    with pytest.raises(ZeroDivisionError):
        await large.run(1 << 20, lambda: 1 // 0)


async def test_freed_memory_is_given_back_after_a_rest_only(monkeypatch):
    """Each second, beside long prompts, it would hold all threads that need memory."""
    given: list[float] = []
    monkeypatch.setattr(off_loop, "give_back", lambda: given.append(time.monotonic()))
    monkeypatch.setattr(off_loop, "_TRIM_AFTER_S", 0.2)
    large = LargeWork()
    for _ in range(20):
        await large.run(1 << 20, lambda: None)
        await asyncio.sleep(0.05)
    ended_s = time.monotonic()
    busy = len(given)
    await asyncio.sleep(0.6)
    assert (busy, len(given)) == (0, 1)
    assert given[0] >= ended_s


async def test_a_shared_result_began_after_each_call_and_faults_are_not_kept() -> None:
    shared: Shared[int] = Shared()
    begun = 0

    async def work() -> int:
        nonlocal begun
        begun += 1
        number = begun
        await asyncio.sleep(0.01)
        if number == 1:
            raise OSError("full")
        return number

    first, *others = await asyncio.gather(
        *(shared.get(work) for _ in range(20)), return_exceptions=True
    )
    assert isinstance(first, OSError)
    assert others == 19 * [2]
    assert await shared.get(work) == 3
