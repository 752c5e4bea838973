"""Real model through the engine on one device, in one process without Ray and Redis.

    python3 -m benchmarks.gpu.real_model --model FILE --device cuda --numerics exact --out F.json
    ... --against CPU.json     compare the tokens with another run's

Eight prompts, greedy and seeded, run alone and together. In ``exact`` the tokens must be the same.
Another device rounds otherwise, so the share of equal tokens is a figure and no check. Then come
tokens per second of the step loop as a worker runs it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.llm import DEFAULT_MODEL, LLM
from baton.types.events import StepDone
from baton.types.geometry import BLOCK_TOKENS
from baton.types.params import SamplingParams

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse at the end of the world, and",
    "1 2 3 4 5 6 7",
    "def fibonacci(n):",
    "The sea is",
    "A train left the station at nine, " * 20,
    "Water boils at",
    "To make bread you need " * 45,
)
KINDS = ((0.0, 0), (0.9, 11))  # temperature, seed
STEP_TOKENS = 2048
CHUNK_TOKENS = 100  # together, prompts are computed in other chunks than alone
PROMPT_BLOCKS = 256  # of all prompts with their output

Tokens = list[list[int]]


def tokens(llm: LLM, prompts: Sequence[str], step_tokens: int, new: int) -> Tokens:
    """Return the tokens of all prompts and kinds, computed together and without a cache."""
    answers: Tokens = []
    for temperature, seed in KINDS:
        llm.core = EngineCore(llm.runner, SchedulerConfig(len(PROMPTS), step_tokens))
        outputs = llm.generate(
            prompts, max_tokens=new, temperature=temperature, seed=seed, ignore_eos=True
        )
        answers += [output.token_ids for output in outputs]
    return answers


def same_until(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def step_rate(llm: LLM, batch: int, prompt_tokens: int, new: int) -> dict[str, float]:
    """Return the median step and the rate of ``batch`` decodes: plan, compute, sample, apply."""
    core = EngineCore(llm.runner, SchedulerConfig(batch, STEP_TOKENS))
    for seed in range(batch):
        drawn = np.random.default_rng(seed).integers(
            0, llm.artifact.config.vocab_size, prompt_tokens
        )
        core.scheduler.submit(_request(seed, drawn.tolist(), new), time.monotonic_ns())
    full_s = []
    began_s = time.monotonic()
    while core.batch.has_work():
        began_ns = time.monotonic_ns()
        plan = core.plan(began_ns)
        if not plan.rows:
            core.take_events()
            continue
        results = core.runner.execute(plan)
        now_ns = time.monotonic_ns()
        step_ns = 1  # so short that chunks of prompts have no limit in time
        events = core.apply(plan, results, now_ns, step_ns)
        load = next(event for event in events if isinstance(event, StepDone))
        if load.decode_rows == batch and not load.prompt_tokens:
            full_s.append((now_ns - began_ns) / 1e9)
    median_s = statistics.median(full_s)
    return {
        "ms": 1e3 * median_s,
        "tokens_per_s": batch / median_s,
        "tokens_per_s_with_prefill": batch * new / (time.monotonic() - began_s),
    }


def _request(number: int, prompt: list[int], new: int) -> EngineRequest:
    spec = RequestSpec(
        kind=Kind.FULL,
        params=SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True),
        hash_seed=b"bench",
        ticket=number,
        cacheable=False,
    )
    return EngineRequest(request_id=f"bench-{number}", prompt=prompt, spec=spec)


def compared(ours: Tokens, theirs: Tokens) -> dict[str, int]:
    """Return the number of equal answers, and of tokens before each first difference."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "answers": len(pairs),
        "equal_answers": sum(left == right for left, right in pairs),
        "tokens": sum(map(len, ours)),
        "tokens_before_a_difference": sum(same_until(left, right) for left, right in pairs),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model reference")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--numerics", choices=("exact", "fast"), default="exact")
    parser.add_argument("--new", type=int, default=48, help="output tokens of each prompt")
    parser.add_argument("--tokens-only", action="store_true", help="only tokens, for --against")
    parser.add_argument("--rows", default="1,8,32,128", help="rows of the step loop")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="prompts of the step loop")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of the step loop")
    parser.add_argument("--against", type=Path, help="another run's --out, to compare tokens")
    parser.add_argument("--out", type=Path, help="write tokens and figures here as JSON")
    return parser.parse_args(arguments)


def _load(options: argparse.Namespace, most_rows: int) -> LLM:
    row_blocks = -(-(options.prompt_tokens + options.steps) // BLOCK_TOKENS) + 1
    began_s = time.monotonic()
    llm = LLM(
        options.model,
        device=options.device,
        numerics=options.numerics,
        kv_blocks=PROMPT_BLOCKS + most_rows * row_blocks,
    )
    print(f"built on {options.device} in {time.monotonic() - began_s:.1f} s", flush=True)
    return llm


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per figure; return 1 if ``exact`` tokens differ."""
    options = _options(arguments)
    rows = [int(count) for count in options.rows.split(",")]
    llm = _load(options, max(rows))
    together = tokens(llm, PROMPTS, CHUNK_TOKENS, options.new)
    record: dict[str, Any] = {
        "device": options.device,
        "numerics": options.numerics,
        "tokens": together,
    }
    if options.against is not None:
        theirs = json.loads(options.against.read_text())["tokens"]
        record["against"] = compared(together, theirs)
        print(f"against {options.against.name}: {record['against']}", flush=True)
    is_wrong = False
    if not options.tokens_only:
        by_prompt = [tokens(llm, [prompt], STEP_TOKENS, options.new) for prompt in PROMPTS]
        alone = [answers[kind] for kind in range(len(KINDS)) for answers in by_prompt]
        record["alone"] = compared(alone, together)
        is_wrong = options.numerics == "exact" and alone != together
        verdict = "   WRONG: exact is broken" if is_wrong else ""
        print(f"alone against together: {record['alone']}{verdict}", flush=True)
        record["step_loop"] = {}
        for count in rows:
            rate = step_rate(llm, count, options.prompt_tokens, options.steps)
            record["step_loop"][count] = rate
            shown = "  ".join(f"{name} {value:.4g}" for name, value in rate.items())
            print(f"{count:4} rows: {shown}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(record) + "\n")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
