"""The routers of ``benchmarks/peers.py`` in front of real vLLM servers on this machine's CPU.

    python -m benchmarks.attached_real [--rounds 3] [--sides baton,smg] [--loads sessions,kill]

`make test-vllm` makes vLLM's environment and the model (SmolLM2) first. Each server has one thread.
Their texts depend on the batch, so they are not compared; cut and failed responses are counted.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

from benchmarks.peers import FIRST_PORT, NAME, Load, Servers, compare, documents, sessions
from tests.vllm.places import ARGS, MODEL, PYTHON

CONTEXT_TOKENS = 4096  # less than the fewest blocks of a load, of which vLLM keeps one
SIDES = "baton,baton without events,vllm-router,smg,round robin"
LOADS = {
    "sessions": Load(partial(sessions, count=8, at_once=2, turns=5, response=16), 256, 0),
    "documents": Load(partial(documents, count=4, words=1_500), 256, 0),
    "kill": Load(partial(sessions, count=6, at_once=3, turns=3, response=64), 256, 0, kills=True),
}


class VllmServers(Servers):
    """Real vLLM servers, each with its processes in a group."""

    model = str(MODEL)
    context_tokens = CONTEXT_TOKENS
    text_is_known = False
    ready_s = 300.0

    def __init__(self, count: int, load: Load, words: Path) -> None:
        self.ports = [FIRST_PORT + number for number in range(count)]
        self._logs = [words.parent / f"{port}.log" for port in self.ports]
        self._processes = [
            self._start(port, load, log) for port, log in zip(self.ports, self._logs, strict=True)
        ]

    def _start(self, port: int, load: Load, log: Path) -> "subprocess.Popen[bytes]":
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port + 1000}",
            "replay_endpoint": f"tcp://*:{port + 2000}",
        }
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        command = [
            *(str(PYTHON.parent / "vllm"), "serve", str(MODEL), "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--port", str(port), *ARGS),
            *("--max-model-len", str(CONTEXT_TOKENS), "--kv-events-config", json.dumps(events)),
            *("--num-gpu-blocks-override", str(load.blocks), "--enable-scale-out"),
            *("--enable-prompt-tokens-details", "--enable-force-include-usage"),
        ]
        with log.open("wb") as output:
            return subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def log(self) -> str:
        """Return the last lines with an error of each server."""
        lines = (log.read_text(errors="replace").splitlines() for log in self._logs)
        errors = ([line for line in one if "Error" in line][-3:] for one in lines)
        return "".join(f"\n{line[:400]}" for one in errors for line in one)

    def kill(self) -> None:
        """Kill all processes of the first server."""
        os.killpg(self._processes[0].pid, signal.SIGKILL)

    def stop(self) -> None:
        """End the processes of all servers."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its engine may outlive a server
            process.wait()


def main() -> None:
    """Run ``python -m benchmarks.attached_real``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--sides", default=SIDES, help="routers")
    parser.add_argument("--loads", default=",".join(LOADS), help="loads")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all")
    asyncio.run(compare(parser.parse_args(), LOADS, VllmServers))


if __name__ == "__main__":
    main()
