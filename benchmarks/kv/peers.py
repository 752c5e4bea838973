"""Other transfer engines on the same blocks: NIXL (UCX) and Mooncake (TCP), memory to memory.

    python -m benchmarks.kv.peers --build       once: each in an environment of its own
    python -m benchmarks.kv.peers [--rounds 7] [--tokens 1024]

As in ``benchmarks.handoff`` one process reads a prompt's KV of an 8B model out of another's
memory, here by what the engine offers: one READ of all runs, prepared before. A run is what lies
together: the blocks of one chunk, of one layer, keys or values (1 MiB), and once more block by
block (32 KiB). Neither verifies what it moved, nor waits for what is not computed yet.
"""

import argparse
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.handoff import CHUNK_TOKENS, geometry


@dataclass(frozen=True, slots=True)
class Engine:
    """What is installed, and what its ends are run with."""

    name: str
    script: str
    package: str
    debs: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


ENGINES = (
    Engine("NIXL", "nixl_end.py", "nixl-cu12==1.5.1"),
    Engine(
        "NIXL by TCP", "nixl_end.py", "nixl-cu12==1.5.1", environment=(("UCX_TLS", "tcp,self"),)
    ),
    Engine(
        "Mooncake by TCP",
        "mooncake_end.py",
        "mooncake-transfer-engine-non-cuda",
        ("libibverbs1", "libnuma1", "librdmacm1", "libnl-3-200", "libnl-route-3-200"),
    ),
)


class PeerError(Exception):
    """A peer is not there, or did not do what it was asked."""


def folder() -> Path:
    """Where the environments lie."""
    root = os.environ.get("BATON_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "baton") / "kv-peers"


def build(engine: Engine) -> None:
    """Install one, unless it is there."""
    place = folder() / engine.package
    if _python(engine).exists() and (place / "built").exists():
        return
    venv.create(place, with_pip=True)
    pip = (str(_python(engine)), "-m", "pip", "install", "--quiet")
    subprocess.run([*pip, "--no-deps", engine.package], check=True)
    subprocess.run([*pip, "numpy"], check=True)
    for deb in engine.debs:  # unpacked beside it, not installed
        subprocess.run(["apt-get", "download", "-q", deb], cwd=place, check=True)
    for archive in place.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(archive), str(place / "debs")], check=True)
    (place / "built").touch()


def _python(engine: Engine) -> Path:
    return folder() / engine.package / "bin" / "python"


@contextmanager
def _end(engine: Engine, role: str, size_bytes: int, run_bytes: int) -> Iterator["_End"]:
    """One process of an engine."""
    if not _python(engine).exists():
        raise PeerError("not built: python -m benchmarks.kv.peers --build")
    libraries = [folder() / engine.package / "debs" / at for at in ("usr/lib", "lib")]
    paths = [f"{path}/x86_64-linux-gnu" for path in libraries]
    script = Path(__file__).parent / engine.script
    process = subprocess.Popen(
        [str(_python(engine)), str(script), role, str(size_bytes), str(run_bytes)],
        env={
            "PATH": os.environ.get("PATH", ""),
            "LD_LIBRARY_PATH": ":".join(paths),
            **dict(engine.environment),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield _End(process)
    finally:
        process.kill()
        process.wait()


class _End:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def say(self, line: str) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise PeerError("no pipe")
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except OSError as error:
            raise PeerError("it ended") from error

    def heard(self, begins: str = "") -> str:
        """The next line that begins so; others are the engine's own chatter."""
        stdout = self._process.stdout
        if stdout is None:
            raise PeerError("no pipe")
        for line in stdout:
            if line.startswith(begins):
                return line.strip()
        raise PeerError("it ended")


def rates(engine: Engine, size_bytes: int, run_bytes: int, rounds: int) -> list[float]:
    """Bytes per second of each round; the first is not counted.

    Raises:
        PeerError: It is not there, or failed.
    """
    with (
        _end(engine, "send", size_bytes, run_bytes) as sender,
        _end(engine, "read", size_bytes, run_bytes) as reader,
    ):
        reader.say(sender.heard("{"))
        reader.heard("ready")
        taken_s = []
        for _ in range(rounds + 1):
            reader.say("again")
            answer = reader.heard()
            try:
                taken_s.append(float(answer))
            except ValueError as error:
                raise PeerError(answer) from error
    return [size_bytes / seconds for seconds in taken_s[1:]]


def main() -> None:
    """Print a line for each engine and size of runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--build", action="store_true", help="install them first")
    options = parser.parse_args()
    shape = geometry(options.tokens)
    block_bytes = shape.block_bytes // (2 * shape.num_layers)
    size_bytes = options.tokens // shape.block_tokens * shape.block_bytes
    sys.stdout.write(
        f"{size_bytes / 2**20:.0f} MiB from memory to memory, median of {options.rounds}\n"
    )
    for engine in ENGINES:
        for run_bytes in (CHUNK_TOKENS // shape.block_tokens * block_bytes, block_bytes):
            words = f"  {engine.name:16} in runs of {run_bytes >> 10:4} KiB"
            try:
                if options.build:
                    build(engine)
                seen = sorted(rates(engine, size_bytes, run_bytes, options.rounds))
            except (PeerError, OSError, subprocess.CalledProcessError) as error:
                sys.stdout.write(f"{words}: not run ({error})\n")
                continue
            sys.stdout.write(
                f"{words} {statistics.median(seen) / 1e9:6.2f} GB/s "
                f"({seen[0] / 1e9:.2f} to {seen[-1] / 1e9:.2f})\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
