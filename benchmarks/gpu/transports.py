"""Probe of NCCL and CUDA IPC for KV on a GPU machine, without a fleet.

    PYTHONPATH=. python3 -m benchmarks.gpu.transports [--mib 256] [--out transports.json]
    ... --device cpu       the same with gloo and shared memory in their places

It needs python3 with only torch. NCCL may refuse two ranks on one GPU; then the row has NCCL's
message. The receiving end of every row compares the bytes. No row describes a fleet, whose pool is
in host memory.
"""

import argparse
import ast
import json
import mmap
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

MESSAGE_BYTES = 4 << 20
ORDER_BYTES = 24
START_S = 60.0  # importing torch and starting CUDA take seconds
HANG_S = 3.0
SENDER = 0
RECEIVER = 1
_STORAGE: Any = torch.UntypedStorage


class ProbeError(RuntimeError):
    """The probe cannot run here; the text gives the reason."""


class WrongBytesError(Exception):
    """The received bytes differ from the sent ones."""


class PairEnd:
    """A rank of ``baton.engine.process.pair``, as ``kvtransfer/pair`` starts it."""

    def __init__(self, rank: int, device: str, store_port: int = 0) -> None:
        staging_fd = os.memfd_create("probe-pair")
        os.ftruncate(staging_fd, MESSAGE_BYTES)
        self.staging = mmap.mmap(staging_fd, MESSAGE_BYTES)
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_S)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "baton.engine.process.pair", str(rank)),
                    *(f"127.0.0.1:{store_port}", "127.0.0.1", device),
                    *(str(theirs.fileno()), str(staging_fd)),
                ],
                pass_fds=(theirs.fileno(), staging_fd),
                stderr=subprocess.PIPE,
            )
        os.close(staging_fd)
        self.store_port = self._report() if rank == SENDER else 0

    def wait(self, timeout_s: float = START_S) -> None:
        """Wait until the group has formed, or an order is done."""
        self._control.settimeout(timeout_s)
        self._report()

    def order(self) -> None:
        """Send the staging memory, or receive into it."""
        parts = (1, 0, MESSAGE_BYTES)
        self._control.sendall(b"".join(part.to_bytes(8, "little") for part in parts))

    def kill(self) -> None:
        """Kill the process, as ``kvtransfer/pair`` does when a collective hangs."""
        self.process.kill()
        self.process.communicate()
        self._control.close()

    def _report(self) -> int:
        report = self._control.recv(ORDER_BYTES, socket.MSG_WAITALL)
        if len(report) == ORDER_BYTES:
            return int.from_bytes(report[:8], "little")
        self.process.wait()
        output = self.process.stderr.read().decode() if self.process.stderr else ""
        lines = [line for line in output.splitlines() if "rror" in line or "uplicate" in line]
        raise ProbeError("; ".join(lines[-3:]) or f"exit code {self.process.returncode}")


def pair_moves(devices: tuple[str, str], messages: int) -> dict[str, Any]:
    """Move messages between ranks and compare each; then receive without a send."""
    ends: list[PairEnd] = []
    try:
        ends.append(PairEnd(SENDER, devices[0]))
        ends.append(PairEnd(RECEIVER, devices[1], ends[0].store_port))
        for end in ends:
            end.wait()
        taken_s = 0.0
        for number in range(messages + 1):  # the first one opens connections
            ends[SENDER].staging[:] = pattern(number)
            began_s = time.perf_counter()
            for end in ends:
                end.order()
            for end in ends:
                end.wait()
            taken_s += (time.perf_counter() - began_s) if number else 0.0
            if ends[RECEIVER].staging[:] != pattern(number):
                raise WrongBytesError(f"message {number} arrived with other bytes")
        ends[RECEIVER].order()
        hangs = _hangs(ends[RECEIVER])
    finally:
        for end in ends:
            end.kill()
    rate = messages * MESSAGE_BYTES / taken_s / 1e9
    return {"gb_per_s": rate, "a_receive_without_a_send_waits": hangs, "ended_by_kill": True}


def _hangs(end: PairEnd) -> bool:
    try:
        end.wait(HANG_S)
    except TimeoutError:
        return True
    return False


def pattern(number: int) -> bytes:
    """Return bytes that no other message has."""
    return number.to_bytes(8, "little") * (MESSAGE_BYTES // 8)


# -------------------------------------------------------------------- memory that is lent


def lend(device: str, size_bytes: int, folder: Path) -> None:
    """Lend this process's memory, and fill it with each number on standard input."""
    if device == "cpu":
        path = str(folder / "lent")
        handle: tuple[Any, ...] = (path, size_bytes)
        pool = torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)
    else:
        pool = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        storage: Any = pool.untyped_storage()
        handle = tuple(storage._share_cuda_())
    print(repr(handle), flush=True)
    for line in sys.stdin:
        pool.fill_(int(line))
        _settled(device)
        print(line.strip(), flush=True)


def _opened(handle: tuple[Any, ...], device: str) -> torch.Tensor:
    if device == "cpu":
        return torch.from_file(handle[0], shared=True, size=handle[1], dtype=torch.uint8)
    storage = _STORAGE._new_shared_cuda(*handle)  # noqa: SLF001 - used by torch.multiprocessing too
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)


def _settled(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def lent_memory(device: str, size_bytes: int) -> dict[str, Any]:
    """Copy another process's memory; report what a late reader sees once its owner is killed."""
    with tempfile.TemporaryDirectory(prefix="baton-probe-") as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.transports", "--lend", folder]
        owner = subprocess.Popen(
            [*command, "--device", device, "--mib", str(size_bytes >> 20)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            return _read_lent(owner, device, size_bytes)
        finally:
            owner.kill()
            owner.communicate()


def _line_of(owner: "subprocess.Popen[str]") -> str:
    line = owner.stdout.readline() if owner.stdout else ""
    if not line:
        raise ProbeError(f"the owner failed with code {owner.wait()}; its output is above")
    return line.strip()


def _read_lent(owner: "subprocess.Popen[str]", device: str, size_bytes: int) -> dict[str, Any]:
    ours = torch.zeros(size_bytes, dtype=torch.uint8, device=device)  # also starts CUDA
    lent = _opened(ast.literal_eval(_line_of(owner)), device)
    rates = []
    for value in range(1, 8):
        print(value, file=owner.stdin, flush=True)
        _line_of(owner)
        began_s = time.perf_counter()
        ours.copy_(lent[:size_bytes])
        _settled(device)
        rates.append(size_bytes / (time.perf_counter() - began_s) / 1e9)
        if not bool((ours == value).all()):
            raise WrongBytesError(f"the copy differs from its owner's last value {value}")
    ours.copy_(lent[:size_bytes])
    lent[:8] = 99  # tests whether a reader can write
    _settled(device)
    owner.kill()
    owner.wait()
    after = _what_is_left(lent, device)
    return {
        "gb_per_s": sorted(rates)[len(rates) // 2],
        "a_reader_can_write": bool((lent[:8] == 99).all()) if after == "readable" else None,
        "after_the_owner_was_killed": after,
    }


def _what_is_left(lent: torch.Tensor, device: str) -> str:
    try:
        lent.sum().item()
        _settled(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "readable"


# -------------------------------------------------------------------- the rows


def rows(device: str, size_bytes: int) -> list[tuple[str, Callable[[], Any]]]:
    """Return the rows for a device."""
    messages = size_bytes // MESSAGE_BYTES
    if device == "cpu":
        pairs = [("gloo pair", ("cpu", "cpu"))]
    else:
        pairs = [("NCCL pair, both ranks on one GPU", ("cuda:0", "cuda:0"))]
        if torch.cuda.device_count() > 1:
            pairs.append(("NCCL pair, two GPUs", ("cuda:0", "cuda:1")))
    lent = "shared memory" if device == "cpu" else "CUDA IPC"
    tried: list[tuple[str, Callable[[], Any]]] = [
        (name, partial(pair_moves, devices, messages)) for name, devices in pairs
    ]
    return [*tried, (lent, partial(lent_memory, device, size_bytes))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per row; return 1 if bytes were wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda:0", help="device of the memory")
    parser.add_argument("--mib", type=int, default=256, help="payload of each row, MiB")
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    parser.add_argument("--lend", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.lend:
        lend(options.device, options.mib << 20, options.lend)
        return 0
    if options.device != "cpu" and not torch.cuda.is_available():
        print("no GPU here (torch.cuda.is_available() is False); --device cpu runs without one")
        return 2
    name = platform.machine() if options.device == "cpu" else torch.cuda.get_device_name()
    record = {"device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    found: dict[str, Any] = {}
    for case, measure in rows(options.device, options.mib << 20):
        try:
            found[case] = measure()
        except (ProbeError, OSError, RuntimeError) as error:
            found[case] = {"not_run": str(error)[:500]}
        except WrongBytesError as error:
            found[case] = {"wrong": str(error)}
        print(case, json.dumps(found[case]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(record | {"rows": found}, indent=1) + "\n")
    return int(any("wrong" in figures for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
