"""Two real engines and a hand-off between them, in one process (their ranks in others).

What the workers' shells do with frames and streams is tested elsewhere; here the KV takes the same
way in one go: read in wire order, digests made and checked, scattered into decode's pages.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.engine.build import build_runner
from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.core.speculative.draft_proposer import DraftProposer
from baton.engine.core.speculative.proposers import NgramProposer, Speculation
from baton.engine.cpu.parallel.rank_processes import RankProcesses
from baton.engine.cpu.runner import CpuRunner
from baton.engine.ipc import map_pool
from baton.engine.settings import EngineSettings
from baton.model.artifact import resolve_model
from baton.model.lora_artifact import read_adapter
from baton.types import events as ev
from baton.types.block_hashes import block_hashes, hash_seed
from baton.types.params import AdapterRef, SamplingParams
from kvtransfer import chunk
from kvtransfer.kv_slice import KvSlice
from tests.engine.core.draft_tokens import FreeDraftTokens
from tests.matrix.cases import Case

BLOCKS = 24  # so few that two requests press each other out
COMPETITOR_TOKENS = 286
MOVED_AFTER_TOKENS = 9  # emitted by an engine that is gone
PROMPT_TOKENS = 70
PULLED_BLOCKS = 3  # of these, while a peer computes the rest
BINDING = chunk.binding("matrix", 1, 1, b"i" * 16)


class Engine:
    """One opened model with its pool; every case gets a scheduler of its own."""

    def __init__(self, model: str, kv: str, ranks: int) -> None:
        settings = EngineSettings(
            model=model,
            kv_blocks=BLOCKS,
            kv_dtype="" if kv == "bf16" else kv,
            tensor_parallel=ranks,
            max_adapters=4,
        )
        self._pool_fd = os.memfd_create("matrix")
        self._ranks = RankProcesses(settings, self._pool_fd) if ranks > 1 else None

        def mapped(geometry):
            self.pool = map_pool(self._pool_fd, geometry)
            return self.pool

        runner, self.info = build_runner(settings, mapped, lambda _: None, self._ranks)
        assert isinstance(runner, CpuRunner)
        self.runner = runner

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        os.close(self._pool_fd)

    def adapt(self, ref: AdapterRef) -> None:
        self.runner.adapters.add(ref, self.runner.adapters.prepare(ref))


@dataclass
class Outcome:
    """What a case came to."""

    tokens: list[int]
    preemptions: int
    cached_tokens: int
    draft_tokens: int


class Rig:
    """Engines by what cannot change while they run, opened when they are first wanted.

    Args:
        model: Reference.
        adapter: A PEFT directory.
        grammar: As ``SamplingParams.grammar``.
        prompt: The request's.
        competitor: Another request's, which presses it out.
        max_tokens: Of the answer.
    """

    def __init__(
        self,
        model: str,
        adapter: Path,
        grammar: str,
        prompt: Sequence[int],
        competitor: Sequence[int],
        max_tokens: int = 24,
    ) -> None:
        self.model = model
        artifact = read_adapter(adapter, resolve_model(model).config, 64)
        self.adapter = AdapterRef("matrix", artifact.digest.hex(), str(adapter))
        self.grammar = grammar
        self.prompt, self.competitor = list(prompt), list(competitor)
        self.max_tokens = max_tokens
        self._engines: dict[tuple[str, int, str], Engine] = {}
        self._plain: dict[Case, list[int]] = {}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def engine(self, kv: str, ranks: int, role: str = "decode") -> Engine:
        key = (kv, ranks, role)
        if key not in self._engines:
            opened = self._engines[key] = Engine(self.model, kv, ranks)
            opened.adapt(self.adapter)
        return self._engines[key]

    def expected(self, case: Case) -> list[int]:
        """Tokens of the same request on the shortest way."""
        if case.plain not in self._plain:
            self._plain[case.plain] = self.run(case.plain).tokens
        return self._plain[case.plain]

    def run(self, case: Case) -> Outcome:
        decode = self.engine(case.kv, case.ranks)
        prefill = self.engine(case.kv, 1, "prefill") if case.path == "disaggregated" else None
        return _Run(self, case, decode, prefill).outcome()

    def params(self, case: Case) -> SamplingParams:
        seeded = {"temperature": 1.0, "top_p": 0.95, "seed": 77, "presence_penalty": 0.4}
        return SamplingParams(
            max_tokens=self.max_tokens,
            grammar=self.grammar if case.grammar else "",
            ignore_eos=not case.grammar,
            **(seeded if case.sampling == "seeded" else {"temperature": 0.0}),
        )

    def speculation(self, case: Case) -> Speculation | None:
        if case.speculation == "off":
            return None
        if case.speculation == "ngram":
            return Speculation(NgramProposer(), 4, FreeDraftTokens())
        draft = self.engine(
            "bf16", 1, "draft"
        )  # the model draft tokens for itself, without adapters
        return Speculation(DraftProposer(draft.runner), 4, FreeDraftTokens())


class _Side:
    """A scheduler over one engine, and what it has said."""

    def __init__(self, engine: Engine, chunk_tokens: int, speculation: Speculation | None) -> None:
        self.engine = engine
        limits = SchedulerConfig(max_batch_requests=4, max_step_tokens=chunk_tokens)
        self.core = EngineCore(
            engine.runner, limits, speculation=speculation, check_every_step=True
        )
        self.view = chunk.PoolView(engine.pool, engine.runner.geometry)
        self.events: list[ev.Event] = []
        self._clock_ns = itertools.count(1)

    def step(self) -> None:
        now_ns = next(self._clock_ns)
        plan = self.core.plan(now_ns)
        self.events += self.core.batch.take_events()
        if plan.rows:
            results = self.core.runner.execute(plan)
            self.events += self.core.apply(plan, results, now_ns, 1_000_000)
        else:
            self.events += self.core.take_events()

    def until(self, kind: type, request_id: str) -> ev.Event:
        """Step until that event of the request is there."""
        for _ in range(2000):
            for event in self.events:
                if isinstance(event, kind) and event.request_id == request_id:
                    return event
            self.step()
        raise TimeoutError(f"no {kind.__name__} of {request_id}: {self.events[-5:]}")


class _Run:
    def __init__(self, rig: Rig, case: Case, decode: Engine, prefill: Engine | None) -> None:
        self.rig, self.case = rig, case
        # A chunk must hold the decodes and a token of a prompt: with a competitor that is enough.
        self.decode = _Side(decode, case.chunk, rig.speculation(case))
        self.prefill = _Side(prefill, case.chunk, None) if prefill is not None else None
        begun = rig.expected(case)[:MOVED_AFTER_TOKENS] if case.moved else []
        self.emitted: list[int] = begun
        self.seed = hash_seed(b"matrix", case.kv, "exact", rig.adapter.digest * case.adapter)

    def request(self, name: str, kind: Kind, **changes) -> EngineRequest:
        params = changes.pop("params", self.rig.params(self.case))
        adapter = self.rig.adapter if self.case.adapter else None
        prompt = changes.pop("prompt", list(self.rig.prompt))
        spec = RequestSpec(
            kind=kind, params=params, hash_seed=self.seed, ticket=9, adapter=adapter, **changes
        )
        return EngineRequest(request_id=name, prompt=prompt, spec=spec)

    def asked(self, kind: Kind) -> EngineRequest:
        """The case's own request at the decoding engine."""
        emitted = (tuple(self.emitted),) if self.emitted else ()
        return self.request("r", kind, emitted=emitted)

    def outcome(self) -> Outcome:
        sides = [side for side in (self.prefill, self.decode) if side is not None]
        if self.case.prefix == "hit":
            for side in sides:
                once = SamplingParams(max_tokens=1, temperature=0.0)
                side.core.scheduler.submit(self.request("first", Kind.FULL, params=once), 0)
                side.until(ev.Ended, "first")
        elif self.case.prefix == "pulled":
            self.pull(sides[0])
        if self.case.preempted:
            self.compete()
        tokens = self.hand_over() if self.prefill is not None else []
        if self.prefill is None:
            self.decode.core.scheduler.submit(self.asked(Kind.FULL), 0)
        tokens = list(self.emitted) or tokens
        end = self.decode.until(ev.Ended, "r")
        assert isinstance(end, ev.Ended)
        assert not end.error_code, end.error_message
        for event in self.decode.events:
            if isinstance(event, ev.Tokens) and event.request_id == "r":
                tokens += [token.token for token in event.tokens]
        speculation = self.decode.core.speculation
        return Outcome(
            tokens,
            end.preemptions,
            end.cached_tokens,
            speculation.draft_tokens if speculation else 0,
        )

    def compete(self) -> None:
        """Another request, with an earlier ticket, grows until the pool is full."""
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        spec = RequestSpec(
            kind=Kind.FULL, params=params, hash_seed=b"other", ticket=1, cacheable=False
        )
        other = EngineRequest(request_id="other", prompt=list(self.rig.competitor), spec=spec)
        self.decode.core.scheduler.submit(other, 0)
        self.decode.until(ev.Tokens, "other")  # else a request with luck in guessing ends before

    def pull(self, side: _Side) -> None:
        """A peer computes a longer prompt; ``side`` pulls the blocks that are there meanwhile."""
        peer = _Side(self.rig.engine(self.case.kv, 1, "peer"), 16, None)
        longer = [*self.rig.prompt, *self.rig.competitor[:90]]
        peer.core.scheduler.submit(self.request("sibling", Kind.PREFILL, prompt=longer), 0)
        size = peer.core.batch.pool.block_tokens
        prefix = longer[: PULLED_BLOCKS * size]
        hashes = block_hashes(self.seed, prefix)
        while len(peer.core.batch.pool.match(hashes)) < PULLED_BLOCKS:
            peer.step()
        held = self.request("pull", Kind.HELD, prompt=prefix)
        peer.core.scheduler.submit(held, 0)
        source = peer.until(ev.Admitted, "pull")
        assert isinstance(source, ev.Admitted)
        ended = [event.request_id for event in peer.events if isinstance(event, ev.PromptDone)]
        assert "sibling" not in ended, "it is computed meanwhile"
        nothing = SamplingParams(max_tokens=2, temperature=0.0)
        remote = self.request("pull", Kind.REMOTE, prompt=prefix, params=nothing, emitted=(None,))
        side.core.scheduler.submit(remote, 0)
        reserved = side.until(ev.Reserved, "pull")
        assert isinstance(reserved, ev.Reserved)
        side.core.scheduler.bind("pull", reserved.generation)
        bound = side.until(ev.Bound, "pull")
        assert isinstance(bound, ev.Bound)
        moved(peer, side, source.blocks, bound.blocks, reserved.skip_blocks, len(prefix))
        assert side.core.scheduler.commit("pull", reserved.generation, [None], 1)
        side.until(ev.Ended, "pull")

    def hand_over(self) -> list[int]:
        """Compute the prompt on prefill and move its KV; returns the first token."""
        assert self.prefill is not None
        here, there = self.prefill, self.decode
        there.core.scheduler.submit(self.asked(Kind.REMOTE), 0)
        there.until(ev.Reserved, "r")
        skip = 0  # all of it is published, so that any later claim can be served
        here.core.scheduler.submit(self.request("r", Kind.PREFILL, skip_blocks=skip), 0)
        done = here.until(ev.PromptDone, "r")
        source = here.until(ev.Admitted, "r")
        assert isinstance(done, ev.PromptDone)
        assert isinstance(source, ev.Admitted)
        first = [sampled.token for sampled in done.first]
        for _ in range(100):
            reserved = self.last_claim()
            there.core.scheduler.bind("r", reserved.generation)
            bound = [e for e in there.core.batch.events if isinstance(e, ev.Bound)]
            if bound:
                skip = reserved.skip_blocks
                moved(here, there, source.blocks, bound[-1].blocks, skip, len(self.rig.prompt))
                assert there.core.scheduler.commit("r", reserved.generation, first, 1)
                here.core.scheduler.release("r")
                here.until(ev.Ended, "r")
                return first
            there.step()  # the competitor has taken the claim's place: it gets another turn
        raise TimeoutError("decode never took the KV")

    def last_claim(self) -> ev.Reserved:
        found = [e for e in self.decode.events if isinstance(e, ev.Reserved)]
        assert found, "there was one"
        return found[-1]


def moved(
    here: _Side,
    there: _Side,
    source: Sequence[int],
    target: Sequence[int],
    skip: int,
    tokens: int,
) -> None:
    """Move the KV of a prompt's tokens but for the first ``skip`` blocks, and compare digests."""
    geometry = here.view.geometry
    blocks = -(-tokens // geometry.block_tokens)
    if blocks == skip:
        return
    kv_slice = KvSlice(
        0,
        geometry.num_layers,
        0,
        geometry.num_kv_heads,
        skip,
        blocks - skip,
        tokens - skip * geometry.block_tokens,
    )
    payload = here.view.read(source, kv_slice)
    made = chunk.digests(payload, kv_slice, geometry, BINDING)
    assert chunk.digests(payload, kv_slice, there.view.geometry, BINDING) == made
    there.view.write(target, kv_slice, payload)
