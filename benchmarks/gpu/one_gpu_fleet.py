"""Prefill worker and decode worker on one GPU, behind the router.

    BATON_DEVICE=cuda python3 -m benchmarks.gpu.one_gpu_fleet --model FILE --out F.json

Every request goes from the prefill worker to the decode worker through host memory. Both share the
GPU's time, so rates describe no fleet; the run shows that a hand-off works on CUDA.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from baton.engine.llm import DEFAULT_MODEL
from benchmarks.fleet import ANSWER_TOKENS, load
from benchmarks.layouts import Layout, bench_fleet, run_one

CLIENTS = (1, 4, 16)
PAIR = Layout(name="pair", server="pair", headers={"x-baton-mode": "disaggregated"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per load; return 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model reference")
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)), help="concurrent clients")
    parser.add_argument("--new", type=int, default=ANSWER_TOKENS, help="tokens of each response")
    parser.add_argument("--kv-blocks", type=int, default=8192, help="KV blocks of each worker")
    parser.add_argument("--threads", default="4", help="CPU threads of each worker")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args(arguments)
    settings = (
        "pools: {prefill: 1, decode: 1}\n"
        f"kv_blocks_per_worker: {options.kv_blocks}\nthreads_per_rank: {options.threads}\n"
    )
    found: dict[int, dict[str, Any]] = {}
    with TemporaryDirectory(prefix="baton-gpu-") as folder:
        home = Path(folder)
        with bench_fleet(home / "pair", settings, model=options.model) as url:
            print(f"the fleet is ready at {url}", flush=True)
            for clients in map(int, options.clients.split(",")):
                summary = run_one(
                    load(clients, 0, options.new), url, PAIR, home / f"{clients}"
                ).summary
                ttft = summary.distributions["ttft_s"]
                found[clients] = {
                    "ends": summary.ends,
                    "tokens_per_s": summary.answer_tokens_per_s,
                    "ttft_p50_s": ttft.p50,
                }
                print(f"{clients} clients: {found[clients]}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(set(figures["ends"]) != {"ok"} for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
