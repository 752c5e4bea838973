"""The step loop's desk for requests that wait for their adapter."""

import select
from collections.abc import Callable

from engine.core.errors import AdapterLoadError
from engine.core.events import Ended
from engine.core.params import AdapterRef, SamplingParams
from engine.process import messages
from engine.process.adapter_loader import AdapterLoader


class Store:
    """Holds anything at once."""

    def prepare(self, ref: AdapterRef) -> str:
        return ref.name

    def add(self, ref: AdapterRef, prepared: str) -> None:
        pass

    def remove(self, digest: str) -> None:
        pass


def submit(request_id: str, adapter: str) -> messages.Submit:
    ref = AdapterRef(adapter, adapter, f"/{adapter}")
    params = SamplingParams(max_tokens=1)
    return messages.Submit(request_id, "full", b"", params, b"", 0, 0, adapter=ref)


def rings(desk: AdapterLoader, within_s: float) -> bool:
    return bool(select.select([desk], [], [], within_s)[0])


def advance_until(
    desk: AdapterLoader, done: Callable[[list[messages.Submit]], bool]
) -> list[messages.Submit]:
    ready = desk.advance()
    while not done(ready):
        assert rings(desk, 5.0)
        ready = desk.advance()
    return ready


def test_an_adapter_that_cannot_be_read_ends_its_requests() -> None:
    class Unreadable(Store):
        def prepare(self, ref: AdapterRef) -> str:
            raise AdapterLoadError("rank 1 cannot read it")

    desk = AdapterLoader(max_loaded=1)
    desk.open(Unreadable())
    desk.want(submit("first", "a"))
    assert desk.advance() == []
    assert rings(desk, 5.0)
    assert desk.advance() == []
    ended, changed = desk.take_events()
    assert (ended.request_id, ended.error_code) == ("first", "adapter_load_failed")
    assert (changed.what, changed.held) == ("failed", 0)


def test_a_place_that_falls_free_wakes_the_idle_loop() -> None:
    desk = AdapterLoader(max_loaded=1)
    desk.open(Store())
    desk.want(submit("first", "a"))
    (first,) = advance_until(desk, bool)
    assert first.request_id == "first"
    desk.want(submit("second", "b"))
    assert desk.advance() == []
    assert not rings(desk, 0.0)
    desk.note([Ended("first")])
    assert rings(desk, 0.0), "nothing else would wake a loop without work for a second"
    (second,) = advance_until(desk, bool)
    assert second.request_id == "second"
