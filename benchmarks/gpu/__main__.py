"""Checks the CUDA path on this machine's GPU, then measures it beside the hardware's limits.

    PYTHONPATH=. python3 -m benchmarks.gpu --out gpu.json     all of it, at most about 8 minutes
    ... --quick        fewer rows
    ... --smoke        toy shapes in Triton's interpreter
    ... --positions    only the check of each position, small enough for compute-sanitizer

It needs python3 with only torch and triton (``transformers`` for its rows). Every row is printed
and written as soon as it is known. Weights and KV are random: speed does not depend on them, and no
file is needed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

GOALS = {"decode": 85.0, "prefill": 65.0, "transformers": 3.0}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
PREFILLS = (2048, 4096, 8192, 16384)
WORKLOADS = ((1, 1024, 64), (32, 1024, 128), (128, 1024, 128))  # requests, prompt, new tokens
RESERVE_BYTES = 12 << 30  # activations, graphs, splits
PEER_TIMEOUT_S = 150.0


class Report:
    """Measured rows, on the terminal and in a file.

    Args:
        budget_s: Time after which further rows are recorded as not run.
    """

    def __init__(self, path: Path | None, budget_s: float) -> None:
        self._path = path
        self._budget_s = budget_s
        self._began = time.monotonic()
        self.record: dict[str, Any] = {"goals": GOALS, "rows": []}

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget_s - (time.monotonic() - self._began)

    def say(self, text: str) -> None:
        """Print a line of text with the time."""
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", flush=True)

    def add(self, section: str, case: str, text: str, **figures: Any) -> None:
        """Add a row to terminal and file."""
        self.record["rows"].append({"section": section, "case": case, **figures})
        self.say(f"{section:12} {case:34} {text}")
        self.write()

    def skip(self, section: str, case: str, why: str) -> None:
        """Add a row that was not run, with the reason."""
        self.add(section, case, f"not run: {why}", not_run=why)

    def run(self, section: str, case: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure a row; running out of time or memory is also recorded."""
        if self.left_s < 0:
            self.skip(section, case, "out of time")
            return
        import torch
        from triton.errors import TritonError

        try:
            figures = measure()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.skip(section, case, "out of memory")
            return
        except (RuntimeError, TritonError) as error:  # the other rows are still useful
            self.skip(section, case, f"{type(error).__name__}: {str(error)[:200]}")
            return
        shown = "  ".join(f"{name} {_short(value)}" for name, value in figures.items())
        self.add(section, case, shown, **figures)

    def write(self) -> None:
        """Write the rows so far into the file."""
        if self._path is not None:
            temporary = self._path.with_suffix(".partial")
            temporary.write_text(json.dumps(self.record, indent=1) + "\n")
            temporary.replace(self._path)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments select; return 1 if a check failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--smoke", action="store_true", help="toy shapes in the interpreter")
    parser.add_argument("--positions", action="store_true", help="only the check of each position")
    parser.add_argument(
        "--no-transformers", action="store_true", help="omit the rows of transformers"
    )
    parser.add_argument(
        "--budget-s", type=float, default=480.0, help="last start of a row, seconds"
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not options.smoke and not torch.cuda.is_available():
        print("no GPU here (torch.cuda.is_available() is False); --smoke runs without one")
        return 2
    from benchmarks.gpu.model import LLAMA_3_8B, TOY, Machine

    machine = (
        Machine(torch.device("cpu"), torch.float32, TOY, smoke=True)
        if options.smoke
        else Machine(torch.device("cuda"), torch.bfloat16, LLAMA_3_8B, smoke=False)
    )
    report = Report(options.out, options.budget_s)
    report.record["setup"] = _setup(options.smoke)
    report.say(json.dumps(report.record["setup"]))
    torch.set_grad_enabled(False)
    from benchmarks.gpu.checks import checks, position_checks

    failed = _correctness(report, (position_checks if options.positions else checks)(machine))
    if options.positions:
        return 1 if failed else 0
    bench = Bench(machine, report, quick=options.quick)
    bench.run(peer=not options.no_transformers)
    if not options.smoke:  # its figures have no meaning
        _summary(report)
    return 1 if failed else 0


def _setup(smoke: bool) -> dict[str, Any]:
    import torch
    import triton

    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": "interpreter" if smoke else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "weights": "random",
    }


def _correctness(report: Report, results: Iterable[tuple[str, str | None]]) -> int:
    from triton.errors import TritonError

    failed = 0
    try:
        for case, fault in results:
            failed += fault is not None
            report.add("check", case, "ok" if fault is None else f"WRONG: {fault}", fault=fault)
    except (RuntimeError, TritonError) as error:
        failed += 1
        fault = f"{type(error).__name__}: {str(error)[:500]}"
        report.add("check", "next check", f"WRONG: {fault}", fault=fault)
    report.record["checks_failed"] = failed
    report.write()
    return failed


class Bench:
    """All measurements of a machine."""

    def __init__(self, machine: Any, report: Report, *, quick: bool) -> None:
        self._machine = machine
        self._report = report
        self._batches: tuple[int, ...] = BATCHES
        self._contexts: tuple[int, ...] = CONTEXTS
        self._prefills: tuple[int, ...] = PREFILLS
        self._workloads: tuple[tuple[int, int, int], ...] = WORKLOADS
        if quick:
            self._batches = (1, 32, 256)
            self._contexts = (1024, 8192)
            self._prefills = (4096,)
            self._workloads = WORKLOADS[1:2]
        if machine.smoke:
            self._batches = (1, 2)
            self._contexts = (40, 64)
            self._prefills = (12,)
            self._workloads = ((2, 6, 3),)

    def run(self, *, peer: bool) -> None:
        """Run all sections, the most important first."""
        from benchmarks.gpu.model import copy_bandwidth, product_rate

        self._copy = copy_bandwidth(self._machine)
        self._product = product_rate(self._machine)
        self._report.add("bound", "copy", f"{self._copy / 1e9:.0f} GB/s", gb_per_s=self._copy / 1e9)
        rate = self._product / 1e12
        self._report.add("bound", "bf16 product", f"{rate:.1f} TFLOP/s", tflop_per_s=rate)
        ours = self._mode("fast", workloads=True)
        self._contexts = self._contexts[::3] if len(self._contexts) > 2 else self._contexts[:1]
        self._batches = tuple(b for b in self._batches if b in (1, 32, 256))
        self._prefills = self._prefills[-2:-1] or self._prefills
        self._mode("exact")
        if peer:
            self._peer(ours)
        self._prefills = ()  # there is no bound for prefill in fp8
        self._mode("fast", fp8=True)

    def _mode(
        self, numerics: str, *, fp8: bool = False, workloads: bool = False
    ) -> dict[str, float]:
        """Measure decode and prefill in one numerics; return seconds of the workloads."""
        from benchmarks.gpu.decode_loop import DecodeLoop
        from benchmarks.gpu.model import BLOCK, random_decoder, workload_s

        machine = self._machine
        report = self._report
        name = f"{numerics} fp8" if fp8 else numerics
        weights = machine.step_weight_bytes() * 1.1
        room = machine.free_bytes() - weights - (0 if machine.smoke else RESERVE_BYTES)
        most = max(b * c for b in self._batches for c in self._contexts)
        tokens = int(min(room // machine.kv_token_bytes, most + BLOCK * max(self._batches)))
        if tokens < max(self._prefills, default=BLOCK):
            report.skip(name, "all", f"only {room / 1e9:.0f} GB free")
            return {}
        decoder = random_decoder(machine, tokens // BLOCK, exact=numerics == "exact", fp8=fp8)
        report.say(f"numerics {name}: pool of {tokens} tokens")
        widest = -(-max(*self._contexts, *(p + n for _, p, n in self._workloads)) // BLOCK)
        loop = DecodeLoop(decoder, max_blocks=widest)
        for context in self._contexts:
            for batch in self._batches:
                case = f"batch {batch}, context {context}"
                if batch * context > tokens:
                    report.skip(f"decode {name}", case, "its KV does not fit")
                else:
                    row = self._decode_row(decoder, loop, batch, context)
                    report.run(f"decode {name}", case, row)
        for count in self._prefills:
            report.run(f"prefill {name}", f"{count} tokens", self._prefill_row(decoder, count))
        seconds: dict[str, float] = {}
        for requests, prompt, new in self._workloads if workloads else ():
            case = f"{requests} x ({prompt} + {new})"

            def measure(r: int = requests, p: int = prompt, n: int = new, c: str = case) -> Any:
                workload_s(machine, decoder, loop, r, p, n)  # captures the graphs
                seconds[c] = workload_s(machine, decoder, loop, r, p, n)
                return {"s": seconds[c], "tokens_per_s": r * n / seconds[c]}

            report.run("workload", case, measure)
        return seconds

    def _decode_row(
        self, decoder: Any, loop: Any, batch: int, context: int
    ) -> Callable[[], dict[str, Any]]:
        from benchmarks.gpu.model import decode_bytes, decode_step_s

        def measure() -> dict[str, Any]:
            seconds = decode_step_s(self._machine, decoder, loop, batch, context)
            rate = decode_bytes(self._machine, batch, context, fp8=decoder.fp8) / seconds
            return {
                "ms": 1e3 * seconds,
                "tokens_per_s": batch / seconds,
                "gb_per_s": rate / 1e9,
                "percent_of_copy": 100 * rate / self._copy,
            }

        return measure

    def _prefill_row(self, decoder: Any, tokens: int) -> Callable[[], dict[str, Any]]:
        from benchmarks.gpu.model import prefill_operations, prefill_s

        def measure() -> dict[str, Any]:
            seconds = prefill_s(self._machine, decoder, tokens)
            rate = prefill_operations(self._machine, tokens) / seconds
            return {
                "ms": 1e3 * seconds,
                "tokens_per_s": tokens / seconds,
                "tflop_per_s": rate / 1e12,
                "percent_of_product": 100 * rate / self._product,
            }

        return measure

    def _peer(self, ours: dict[str, float]) -> None:
        """Run ``transformers`` in a separate process, which frees its memory and can be killed."""
        self._machine.free_bytes()  # frees our decoder's memory
        for requests, prompt, new in self._workloads:
            case = f"{requests} x ({prompt} + {new})"
            if case not in ours:
                self._report.skip("transformers", case, "ours was not run")
                continue
            limit = min(PEER_TIMEOUT_S, self._report.left_s)
            if limit < 30:
                self._report.skip("transformers", case, "out of time")
                continue
            peer = run_peer(requests, prompt, new, smoke=self._machine.smoke, timeout_s=limit)
            if "not_run" in peer:
                self._report.skip("transformers", case, str(peer["not_run"]))
                continue
            ratio = float(peer["s"]) / ours[case]
            text = f"s {peer['s']:.4g}  ours is {ratio:.2f} x as fast"
            self._report.add("transformers", case, text, s=peer["s"], ratio=ratio)


def run_peer(
    requests: int, prompt: int, new: int, *, smoke: bool, timeout_s: float
) -> dict[str, Any]:
    """Return the seconds of a workload in ``benchmarks.gpu.peer``, or the reason for none."""
    command = [sys.executable, "-m", "benchmarks.gpu.peer"]
    command += [str(requests), str(prompt), str(new)] + (["--smoke"] if smoke else [])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"not_run": f"took more than {timeout_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"not_run": f"exit code {done.returncode}: {last[:200]}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _summary(report: Report) -> None:
    rows = report.record["rows"]
    goals = (
        ("decode fast", "percent_of_copy", GOALS["decode"]),
        ("prefill fast", "percent_of_product", GOALS["prefill"]),
        ("transformers", "ratio", GOALS["transformers"]),
    )
    summary = {}
    for section, key, goal in goals:
        values = [row[key] for row in rows if row["section"] == section and key in row]
        if not values:
            report.say(f"{section}: nothing was measured")
            continue
        reached = sum(value >= goal for value in values)
        summary[section] = {"goal": goal, "rows": len(values), "reached": reached}
        text = f"{key} from {min(values):.4g} to {max(values):.4g}"
        report.say(f"{section}: {text}; goal {goal:g} reached in {reached} of {len(values)} rows")
    report.record["summary"] = summary
    report.say(f"checks failed: {report.record['checks_failed']}")
    report.write()


if __name__ == "__main__":
    sys.exit(main())
