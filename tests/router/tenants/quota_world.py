"""Routers that share the limits of one tenant over a network that loses and delays exchanges."""

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.tenants.bank import Ask, Grant
from baton.tenants.limits import Limits
from router.tenants.quota import EXCHANGE_NS, QuotaReservation, Quotas, Wait
from tests.tenants.bank import Bank

TENANT = "team"
MS = 1_000_000
START_MS = 1_790_000_000_000


@dataclass(eq=False)
class Node:
    quotas: Quotas
    dead: bool = False
    running: list[tuple[QuotaReservation, int, "Admitted"]] = field(default_factory=list)


@dataclass(eq=False)
class Admitted:
    """Admitted call; ``net_tokens`` is what it reserved, and what it used once it has ended."""

    at_ms: int
    node: Node
    net_tokens: int


@dataclass(eq=False)
class World:
    """A bank, routers, and everything that was admitted.

    Attributes:
        births: Number of routers that ever started.
    """

    limits: Limits
    count: int
    bank: Bank = field(default_factory=Bank)
    now_ms: int = 5_000
    clock_ms: int = START_MS
    admitted: list[Admitted] = field(default_factory=list)
    refused: int = 0
    births: int = 0
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = [self.born() for _ in range(self.count)]

    def born(self) -> Node:
        self.births += 1
        quotas = Quotas(f"router-{self.births}", self.clock_ms - self.now_ms)
        quotas.live_routers = self.count
        quotas.set_limits({TENANT: self.limits})
        return Node(quotas)

    @property
    def now_ns(self) -> int:
        return self.now_ms * MS

    def pass_ms(self, ms: int) -> None:
        self.now_ms += ms
        self.clock_ms += ms

    def asked(self, node: Node) -> dict[str, Ask]:
        return node.quotas.asks(self.now_ns)

    def answered(self, asks: dict[str, Ask]) -> dict[str, Grant]:
        return {name: self.bank.exchange(ask, self.clock_ms) for name, ask in asks.items()}

    def exchange(self, node: Node) -> None:
        node.quotas.granted(self.answered(self.asked(node)), self.now_ns)

    def call(self, node: Node, prompt: int, answer: int, choices: int = 1, patient: bool = False):
        """Try to run one call, with an exchange on need, as the router does.

        A patient one also waits until other routers have returned leases.
        """
        found = node.quotas.take(TENANT, prompt, choices, answer, self.now_ns)
        tries = 0
        while isinstance(found, Wait) and found.asks and tries < 7:
            if patient and tries > 1:
                self.run(EXCHANGE_NS / MS / 1000, lambda *_: None)
            else:
                self.exchange(node)
            found = node.quotas.take(TENANT, prompt, choices, answer, self.now_ns)
            tries += 1
        if isinstance(found, QuotaReservation):
            entry = Admitted(self.now_ms, node, found.tokens)
            self.admitted.append(entry)
            node.running.append((found, prompt, entry))
        else:
            self.refused += 1
        return found

    def end(self, node: Node, answered: int) -> None:
        """End the oldest running call of a router."""
        reservation, prompt, entry = node.running.pop(0)
        entry.net_tokens = prompt + answered
        node.quotas.settle(reservation, prompt, answered, self.now_ns)

    def most_in_a_minute(self) -> int:
        """Return the largest number of calls that were admitted in any minute."""
        most = begin = 0
        for index, entry in enumerate(self.admitted):
            while self.admitted[begin].at_ms <= entry.at_ms - 60_000:
                begin += 1
            most = max(most, index - begin + 1)
        return most

    def run(self, seconds: float, demand: Callable[["World", int], None]) -> None:
        """Run ``demand(world, tick)`` every 10 ms, and the exchanges of each router in turn."""
        every = EXCHANGE_NS // MS // 10
        for tick in range(int(seconds * 100)):
            demand(self, tick)
            for index, node in enumerate(self.nodes):
                if not node.dead and tick % every == index * 5 % every:
                    self.exchange(node)
            self.pass_ms(10)
