"""A step of four sequences, its ranks here and there: ``python -m tests.hosts.step_cost JSON``.

One line of JSON: worker -> milliseconds of a step, the median of rounds in turns. All answers are
compared.
"""

import asyncio
import os
import statistics
import sys
import time

import msgspec

from tests.workers.harness import MiniRouter, WorkerProcess, routed
from tests.workers.test_tensor_parallel import PROMPT, SMOLLM2

SEQUENCES, TOKENS, ROUNDS = 4, 33, 5


async def step_ms(router: MiniRouter, round_number: int) -> tuple[float, list[list[int]]]:
    """Of sequences that decode together, and what they say."""
    names = [f"{round_number}.{n}" for n in range(SEQUENCES)]
    sampling = {"max_tokens": TOKENS}
    for n, name in enumerate(names):
        await router.submit(name, PROMPT[n : n + 40], None, sampling=sampling)
    await router.until(lambda: all(router.tokens[name].get(0) for name in names), 60)
    began = time.monotonic()
    done = [len(router.tokens[name][0]) for name in names]
    for name in names:
        end = await router.ended(name, 120)
        assert not end.HasField("error"), end.error.message
    elapsed_ms = 1e3 * (time.monotonic() - began)
    return elapsed_ms / (TOKENS - min(done)), [router.tokens[name][0] for name in names]


async def main(host: str, rank: str) -> None:
    here = {"model": SMOLLM2, "host": host, "insecure": True}
    own = {**here, "tensor_parallel": 2, "rank_memory": "own"}
    kinds = {
        "one rank": here,
        "two ranks, one host": own,
        "two ranks, two hosts": {**own, "rank_addresses": (rank,)},
    }
    started = {
        kind: await WorkerProcess.start(f"decode-{number}", **fields)
        for number, (kind, fields) in enumerate(kinds.items())
    }
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    try:
        for round_number in range(ROUNDS):
            answers = []
            for kind, worker in started.items():
                async with routed(worker, f"router {round_number}") as router:
                    ms, said = await step_ms(router, round_number)
                took[kind].append(ms)
                answers.append(said)
            assert all(said == answers[0] for said in answers), "the tokens of one rank"
    finally:
        await asyncio.gather(*(worker.stop() for worker in started.values()))
    found = {kind: round(statistics.median(ms), 1) for kind, ms in took.items()}
    found["load average"] = round(os.getloadavg()[0], 2)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    asyncio.run(main(**msgspec.json.decode(sys.argv[1])))
