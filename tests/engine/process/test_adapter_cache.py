"""Who gets an adapter, who waits, and which one goes: the LRU limit is never exceeded."""

import random

from baton.engine.process.adapter_cache import AdapterCache
from baton.types.params import AdapterRef


def ref(name: str) -> AdapterRef:
    return AdapterRef(name, name, f"/{name}")


class Engine:
    """A cache, and what would be in memory."""

    def __init__(self, max_loaded: int) -> None:
        self.cache: AdapterCache[str] = AdapterCache(max_loaded)
        self.max_loaded = max_loaded
        self.held: set[str] = set()
        self.loading: list[str] = []
        self.using: dict[str, str] = {}
        self.log: list[str] = []

    def add(self, request: str, adapter: str) -> None:
        self.cache.add(request, ref(adapter), f"{request}/{adapter}")

    def end(self, request: str) -> None:
        del self.using[request]
        self.cache.ended(request)

    def load(self) -> None:
        adapter = self.loading.pop(0)
        self.held.add(adapter)
        self.cache.loaded(adapter)

    def advance(self) -> list[str]:
        evicted, to_load, ready = self.cache.advance()
        for adapter in evicted:
            assert adapter not in self.using.values(), "never taken from under a request"
            self.held.remove(adapter)
            self.log.append(f"-{adapter}")
        self.loading += [wish.digest for wish in to_load]
        assert len(self.held) + len(self.loading) <= self.max_loaded
        for item in ready:
            request, adapter = item.split("/")
            assert adapter in self.held
            self.using[request] = adapter
            self.log.append(item)
        return ready

    def run(self) -> list[str]:
        """Advance and load until nothing moves; who may go on."""
        ready = self.advance()
        while self.loading:
            self.load()
            ready += self.advance()
        return ready


def test_the_first_request_waits_for_the_load_and_the_next_does_not():
    engine = Engine(2)
    engine.add("1", "a")
    assert engine.advance() == []
    assert engine.loading == ["a"]
    engine.add("2", "a")
    assert engine.advance() == [], "one load serves both"
    assert engine.loading == ["a"]
    engine.load()
    assert engine.advance() == ["1/a", "2/a"]
    engine.add("3", "a")
    assert engine.advance() == ["3/a"]


def test_the_least_recently_used_idle_adapter_goes():
    engine = Engine(2)
    for number, adapter in enumerate("ab"):
        engine.add(str(number), adapter)
        engine.run()
        engine.end(str(number))
    engine.add("again", "a")
    engine.run()
    engine.end("again")
    engine.add("new", "c")
    assert engine.run() == ["new/c"]
    assert engine.held == {"a", "c"}


def test_a_busy_adapter_is_never_taken_and_a_newcomer_waits_for_a_place():
    engine = Engine(1)
    engine.add("1", "a")
    engine.run()
    engine.add("2", "b")
    assert engine.run() == []
    engine.end("1")
    assert engine.run() == ["2/b"]
    assert engine.held == {"b"}


def test_an_adapter_that_is_always_busy_gives_way_in_bounded_time():
    engine = Engine(1)
    engine.add("1", "a")
    engine.run()
    engine.add("2", "b")
    engine.run()
    engine.add("3", "a")
    assert engine.run() == [], "it would keep the place for ever"
    engine.end("1")
    assert engine.run() == ["2/b"]
    engine.end("2")
    assert engine.run() == ["3/a"]


def test_a_newcomer_that_gives_up_leaves_the_others_running():
    engine = Engine(1)
    engine.add("1", "a")
    engine.run()
    engine.add("2", "b")
    engine.add("3", "a")
    engine.run()
    assert engine.cache.drop("2")
    assert not engine.cache.drop("2")
    assert engine.run() == ["3/a"]


def test_a_load_that_fails_fails_who_waited_for_it_and_frees_the_place():
    engine = Engine(1)
    engine.add("1", "bad")
    engine.add("2", "bad")
    engine.add("3", "good")
    engine.advance()
    engine.loading.clear()
    assert engine.cache.failed("bad") == ["1", "2"]
    assert engine.run() == ["3/good"]


def test_any_mixture_of_requests_is_served_once_within_the_limit():
    for seed in range(30):
        chance = random.Random(seed)
        engine = Engine(chance.randint(1, 4))
        for number in range(80):
            engine.add(str(number), chance.choice("abcdefg"))
            if engine.using and chance.random() < 0.4:
                engine.end(chance.choice(list(engine.using)))
            engine.advance()
            if engine.loading and chance.random() < 0.5:
                engine.load()
        while engine.cache.waiting or engine.using:
            engine.run()
            assert engine.using, "somebody can always go on"
            engine.end(next(iter(engine.using)))
        served = [line.split("/")[0] for line in engine.log if "/" in line]
        assert sorted(served, key=int) == [str(number) for number in range(80)]
