"""An engine core with a pool of its own, stepped by hand."""

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.core.speculative.proposers import Speculation
from baton.engine.emulated import EmulatedRunner
from baton.types import events as ev
from baton.types.geometry import KvGeometry
from baton.types.params import SamplingParams
from kvtransfer import chunk

SEED = b"s" * 16
PARAMS = SamplingParams(max_tokens=5, temperature=0.0)
LAYERS = 3


def spec_of(kind: Kind, ticket: int = 0, skip_blocks: int = 0) -> RequestSpec:
    return RequestSpec(
        kind=kind, params=PARAMS, hash_seed=SEED, ticket=ticket, skip_blocks=skip_blocks
    )


class Engine:
    """A core, its pool, and its view for frames."""

    def __init__(self, blocks: int, speculation: Speculation | None = None) -> None:
        geometry = KvGeometry(
            num_layers=LAYERS, num_kv_heads=2, head_dim=4, num_blocks=blocks, dtype="bf16"
        )
        data = bytearray(geometry.pool_bytes)
        self.core = EngineCore(
            EmulatedRunner(geometry, data),
            SchedulerConfig(8, 32),
            group_layers_bytes=1,
            check_every_step=True,
            speculation=speculation,
        )
        self.view = chunk.PoolView(data, geometry)

    def step(self, now_ns: int) -> list[ev.Event]:
        plan = self.core.plan(now_ns)
        early = self.core.batch.take_events()
        if not plan.rows:
            return early + self.core.take_events()
        published: list[ev.Event] = []
        publications = self.core.publications(plan)

        def done(layers: int) -> None:
            events = [p.on_layers_done(layers, LAYERS) for p in publications]
            published.extend(event for event in events if event)

        results = self.core.runner.execute(plan, done)
        return early + published + self.core.apply(plan, results, now_ns, 1)


def golden(prompt: list[int]) -> list[int]:
    engine = Engine(64)
    engine.core.scheduler.submit(
        EngineRequest(request_id="g", prompt=prompt, spec=spec_of(Kind.FULL)), 0
    )
    tokens: list[int] = []
    for now_ns in range(50):
        for event in engine.step(now_ns):
            if isinstance(event, ev.Tokens):
                tokens += [token.token for token in event.tokens]
    return tokens
