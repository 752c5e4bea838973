"""Probe of `baton doctor --address`: a Ray actor on each node."""

import asyncio
import contextlib
import hashlib
import importlib.metadata
import os
import resource
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from baton.config.fleet_file import EMBEDDED, FleetConfig
from baton.control_groups import free_memory_bytes, usable_cpus
from baton.types.errors import BatonError
from fleet.pools.checks.findings import Cell, MeasuredEdge, NodeReport

ROOT = Path(__file__).parents[3]
_PACKAGES = ("baton", "decode_worker", "fleet", "kvtransfer", "prefill_worker", "router")
_CONNECT_S = 2.0
_SEND_S = 0.4  # per edge
_CHUNK = bytes(256 * 1024)
_LEAST_FREE_GIB = 1.0
_LEAST_MEMORY_GIB = 2.0
_LEAST_FILES = 1024


class NodeProbe:
    """Checks its node, and measures the bandwidth to other nodes."""

    def __init__(self, config_json: str, address: str) -> None:
        self._config = FleetConfig.model_validate_json(config_json)
        self._address = address
        self._server: asyncio.Server | None = None

    async def now(self) -> float:
        """Return this node's wall clock in seconds."""
        return time.time()

    async def report(self) -> bytes:
        """Run all checks; return a `NodeReport` as msgpack."""
        checks: dict[str, Callable[[], Awaitable[str]]] = {
            "baton": _in_thread(code_version),
            "python": _in_thread(lambda: sys.version.split()[0]),
            "torch": _in_thread(lambda: importlib.metadata.version("torch")),
            "ray": _in_thread(lambda: importlib.metadata.version("ray")),
            "grpcio": _in_thread(lambda: importlib.metadata.version("grpcio")),
            "wire": _in_thread(_wire),
            "model": _in_thread(self._model),
            "redis": self._redis,
            "files": _in_thread(open_files),
            "disk": _in_thread(_disk),
            "memory": _in_thread(lambda: available_memory(_LEAST_MEMORY_GIB)),
        }
        engine = self._config.pools.engine
        if self._config.pools.vllm is not None:
            checks["vllm"] = _in_thread(self._vllm)
        if engine.emulated is None and engine.external is None:
            checks["sums"] = _in_thread(self._sums)
        cells = {name: await _cell(check) for name, check in checks.items()}
        return msgspec.msgpack.encode(NodeReport(cells=cells))

    async def listen(self) -> int:
        """Receive bytes from other nodes on a port of the fleet's range, and return the port."""
        from fleet.ports import free_port

        port = free_port(self._address, self._config.pools.ports or "")
        self._server = await asyncio.start_server(_swallow, self._address, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close the listening port."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def measure(self, name: str, target: str, address: str, port: int) -> bytes:
        """Send bytes to the probe of another node, and return an `MeasuredEdge` as msgpack."""
        edge = MeasuredEdge(source=name, target=target)
        try:
            rate = await _send(address, port)
        except (OSError, TimeoutError) as error:
            why = f"cannot connect to port {port} of {address} ({error or type(error).__name__})"
            return msgspec.msgpack.encode(msgspec.structs.replace(edge, problem=why))
        return msgspec.msgpack.encode(msgspec.structs.replace(edge, bytes_per_s=rate))

    async def reaches(self, address: str, port: int) -> str:
        """Return why a port of another node cannot be connected to; empty if it can."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            return f"cannot connect to port {port} of {address} ({error or type(error).__name__})"
        await _hang_up(writer)
        return ""

    def _model(self) -> str:
        from baton.model.artifact import resolve_model

        external = self._config.pools.engine.external is not None
        artifact = resolve_model(self._config.model, allow_unsupported=external)
        return artifact.weights_digest.hex()[:12]

    def _vllm(self) -> str:
        from baton.engine.vllm.interpreter import vllm_version

        vllm = self._config.pools.vllm
        if vllm is None or vllm.python is None:
            return ""
        return vllm_version(vllm.python, vllm.hand_off)

    def _sums(self) -> str:
        from baton.engine.cpu.native import library

        library.choose_native(self._config.numerics.native)
        return "torch" if library.load() is None else library.sums_name()

    async def _redis(self) -> str:
        from baton.registry.redis_store import Registry

        if self._config.redis == EMBEDDED:
            raise ValueError(
                "redis = embedded serves one machine only: set `redis:` to a server's URL"
            )
        registry = Registry(self._config.redis, self._config.fleet)
        try:
            await registry.birth()
            began_s = time.monotonic()
            await registry.birth()
            return f"{1e3 * (time.monotonic() - began_s):.1f} ms"
        finally:
            await registry.close()


def code_version() -> str:
    """Return the version and a digest of the sources, which differ on nodes with local edits."""
    digest = hashlib.blake2b(digest_size=4)
    for package in _PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode())
            digest.update(file.read_bytes())
    try:
        version = importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return f"{version} ({digest.hexdigest()})"


async def _cell(check: Callable[[], Awaitable[str]]) -> Cell:
    try:
        return Cell(await check())
    except (BatonError, OSError, ValueError, RuntimeError, ImportError) as error:
        return Cell("–", str(error) or type(error).__name__)


def _in_thread(check: Callable[[], str]) -> Callable[[], Awaitable[str]]:
    return lambda: asyncio.to_thread(check)


def _wire() -> str:
    from baton.wire.compatibility import WIRE_MAX, WIRE_MIN

    return f"{WIRE_MIN}-{WIRE_MAX}"


def _disk() -> str:
    """Return the free space of the fullest disk among those of Ray, logs and converted weights."""
    from baton.folders import cache_root

    folders = [Path("/tmp"), cache_root()]  # noqa: S108 - Ray's
    there = [next(f for f in (folder, *folder.parents) if f.exists()) for folder in folders]
    free = {str(folder): shutil.disk_usage(folder).free / 2**30 for folder in there}
    folder = min(free, key=lambda name: free[name])
    if free[folder] < _LEAST_FREE_GIB:
        raise ValueError(
            f"{free[folder]:.2f} GiB free in {folder}, at least {_LEAST_FREE_GIB:g} GiB needed"
        )
    if closed := [name for name in free if not os.access(name, os.W_OK)]:
        raise ValueError(f"{closed[0]} is not writable")
    return f"{free[folder]:.0f} GiB free"


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Receive bytes until the sender is done, and send it the rate."""
    with contextlib.suppress(OSError):
        taken = 0
        began_s = time.monotonic()
        last_s = time.monotonic()
        while data := await reader.read(len(_CHUNK)):
            taken += len(data)
            last_s = time.monotonic()
        writer.write(f"{taken / max(last_s - began_s, 1e-6)}\n".encode())
        await writer.drain()
    await _hang_up(writer)


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _send(address: str, port: int) -> float:
    """Send bytes and return the rate per second that the receiver measured."""
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(address, port)
    try:
        until_s = time.monotonic() + _SEND_S
        async with asyncio.timeout(_SEND_S + 8 * _CONNECT_S):  # a slow link has queued bytes
            while time.monotonic() < until_s:
                writer.write(_CHUNK)
                await writer.drain()
            writer.write_eof()
            return float(await reader.readline())
    except ValueError as error:
        raise OSError("connection lost") from error
    finally:
        await _hang_up(writer)


def available_memory(least_gib: float) -> str:
    """Return the available memory as text."""
    gib = free_memory_bytes() / 2**30
    if gib < least_gib:
        raise RuntimeError(f"{gib:.1f} GiB available, at least {least_gib:g} GiB needed")
    return f"{gib:.1f} GiB available, {usable_cpus()} cores"


def open_files() -> str:
    """Return the limit of open files as text."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _LEAST_FILES:
        raise RuntimeError(f"limit {soft}, at least {_LEAST_FILES} needed: `ulimit -n {hard}`")
    return f"limit {soft}"
