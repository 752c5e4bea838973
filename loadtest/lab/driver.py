"""Engine that a lab steps by hand, with a record of every step and request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.llm import LLM
from baton.types import events as ev
from baton.types.params import SamplingParams
from loadtest.lab.places import awaiting
from loadtest.lab.table import LabContext


def engine(context: LabContext, **options: Any) -> LLM:
    """Load the model of a lab into an engine; ``options`` are those of `LLM`."""
    with awaiting(f"the model {context.model}"):
        return LLM(context.model, threads=context.threads, **options)


@dataclass(slots=True)
class DrivenRequest:
    """Request to the engine, with times on the driver's clock."""

    submitted_s: float
    token_s: list[float] = field(default_factory=list)  # time of each token
    tokens: list[int] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token in seconds."""
        return self.token_s[0] - self.submitted_s


@dataclass(slots=True)
class MeasuredStep:
    """Measurements of one engine step."""

    seconds: float
    prompt_tokens: int
    decode_rows: int


class Driver:
    """Fresh scheduler and empty cache for a model. ``bounded`` limits chunks as in a fleet."""

    def __init__(
        self,
        llm: LLM,
        *,
        max_batch_requests: int = 32,
        max_step_tokens: int = 512,
        bounded: bool = True,
    ) -> None:
        self._bounded = bounded
        self.core = EngineCore(llm.runner, SchedulerConfig(max_batch_requests, max_step_tokens))
        self.requests: dict[str, DrivenRequest] = {}
        self.steps: list[MeasuredStep] = []
        self._vocabulary = llm.artifact.config.vocab_size

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Return random tokens, equal for equal seeds."""
        drawn = np.random.default_rng(seed).integers(0, self._vocabulary, tokens)
        return [int(token) for token in drawn]

    def submit(self, prompt: Sequence[int], max_tokens: int) -> DrivenRequest:
        """Queue a request for a greedy response of exactly ``max_tokens`` tokens."""
        name = f"lab-{len(self.requests)}"
        request = self.requests[name] = DrivenRequest(time.monotonic())
        spec = RequestSpec(
            kind=Kind.FULL,
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            hash_seed=b"lab",
            ticket=len(self.requests),
            cacheable=False,
        )
        engine_request = EngineRequest(request_id=name, prompt=list(prompt), spec=spec)
        self.core.scheduler.submit(engine_request, time.monotonic_ns())
        return request

    def step(self) -> None:
        """Run one step, and record its tokens and ends."""
        began_ns = time.monotonic_ns()
        plan = self.core.plan(began_ns)
        if not plan.rows:
            self._note(self.core.take_events())
            return
        results = self.core.runner.execute(plan)
        now_ns = time.monotonic_ns()
        step_ns = now_ns - began_ns if self._bounded else 1  # the time limit is computed from it
        events = self.core.apply(plan, results, now_ns, step_ns)
        load = next(event for event in events if isinstance(event, ev.StepDone))
        seconds = (now_ns - began_ns) / 1e9
        self.steps.append(MeasuredStep(seconds, load.prompt_tokens, load.decode_rows))
        self._note(events)

    def run(self) -> float:
        """Step until nothing is left; return the seconds that it took."""
        began_s = time.monotonic()
        while self.core.batch.has_work():
            self.step()
        return time.monotonic() - began_s

    def _note(self, events: Sequence[ev.Event]) -> None:
        now_s = time.monotonic()
        for event in events:
            if isinstance(event, ev.Tokens):
                request = self.requests[event.request_id]
                request.token_s += [now_s] * len(event.tokens)
                request.tokens += [sampled.token for sampled in event.tokens]
            elif isinstance(event, ev.Ended):
                self.requests[event.request_id].ended_s = now_s


def warm(llm: LLM) -> None:
    """Run some requests that are not measured."""
    driver = Driver(llm)
    for seed in range(4):
        driver.submit(driver.prompt(64, seed), 4)
    driver.run()
