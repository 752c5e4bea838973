"""Requests of the step loop that wait for their adapter."""

import select
from collections.abc import Callable

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.engine.process.adapter_loader import AdapterLoader
from baton.types.errors import AdapterLoadError
from baton.types.events import Ended
from baton.types.params import AdapterRef, SamplingParams


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
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=b"", adapter=ref)
    return messages.Submit(request_id=request_id, prompt_token_ids=b"", spec=spec)


def wakes(loader: AdapterLoader, within_s: float) -> bool:
    return bool(select.select([loader], [], [], within_s)[0])


def advance_until(
    loader: AdapterLoader, done: Callable[[list[messages.Submit]], bool]
) -> list[messages.Submit]:
    ready = loader.advance()
    while not done(ready):
        assert wakes(loader, 5.0)
        ready = loader.advance()
    return ready


def test_an_adapter_that_cannot_be_read_ends_its_requests() -> None:
    class Unreadable(Store):
        def prepare(self, ref: AdapterRef) -> str:
            raise AdapterLoadError("rank 1 cannot read it")

    loader = AdapterLoader(max_loaded=1, store=Unreadable())
    loader.add(submit("first", "a"))
    assert loader.advance() == []
    assert wakes(loader, 5.0)
    assert loader.advance() == []
    ended, changed = loader.take_events()
    assert (ended.request_id, ended.error_code) == ("first", "adapter_load_failed")
    assert (changed.what, changed.held) == ("failed", 0)


def test_a_place_that_falls_free_wakes_the_idle_loop() -> None:
    loader = AdapterLoader(max_loaded=1, store=Store())
    loader.add(submit("first", "a"))
    (first,) = advance_until(loader, bool)
    assert first.request_id == "first"
    loader.add(submit("second", "b"))
    assert loader.advance() == []
    assert not wakes(loader, 0.0)
    loader.note([Ended("first")])
    assert wakes(loader, 0.0), "nothing else would wake a loop without work for a second"
    (second,) = advance_until(loader, bool)
    assert second.request_id == "second"
