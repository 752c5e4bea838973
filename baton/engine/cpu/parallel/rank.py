"""Process of one rank of a tensor-parallel replica; it computes its part of every pass.

    python -m baton.engine.cpu.parallel.rank RANK SOCKET_FD LOADER_FD POOL_FD STORE SETTINGS_JSON

``SOCKET_FD`` and ``LOADER_FD`` are ends of Unix socket pairs to the leader
(``baton/engine/cpu/parallel/rank_processes.py``), for orders and for reading adapters meanwhile.
``POOL_FD`` is the memory file of the KV pool, the replica's or this rank's own. ``STORE`` is the
file where the ranks find each other. The process ends when the leader does or its
group breaks, and with exit code 1 when it fails.
"""

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import msgspec
import torch

from baton.engine.cpu.attention import AttentionTiling
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.load import load_model
from baton.engine.cpu.lora import CpuAdapters
from baton.engine.cpu.native.library import choose_native
from baton.engine.cpu.parallel import rank_processes as ranks
from baton.engine.cpu.parallel.shard import Group, Shard
from baton.engine.cpu.runner import CpuRunner
from baton.engine.ipc import FrameReader, map_pool, own_pool
from baton.engine.models.lora import Adapter
from baton.engine.numerics import DTYPES, Numerics, numerics_of
from baton.engine.parent import die_with_parent
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelArtifact, resolve_model
from baton.telemetry.process_memory import give_back
from baton.types.errors import BatonError
from baton.types.params import AdapterRef


class AdapterDesk:
    """Reads adapters in a thread, on orders from a socket, until the leader ends."""

    def __init__(self, loader: socket.socket, adapters: CpuAdapters) -> None:
        self._loader = loader
        self._adapters = adapters
        self._prepared: dict[str, Adapter] = {}  # read, and not yet in use
        threading.Thread(target=self._read, daemon=True).start()

    def take(self, digest: str) -> Adapter:
        """Return an adapter that was read, and drop it here."""
        return self._prepared.pop(digest)

    def _read(self) -> None:
        reader = FrameReader(msgspec.msgpack.Decoder(list[ranks.LoaderOrder]))
        with contextlib.suppress(OSError):
            while data := self._loader.recv(1 << 16):
                for order in reader.feed(data):
                    match order:
                        case ranks.Prepare(ref):
                            answer = ranks.Prepared(ref.digest, self._prepare(ref))
                            self._loader.sendall(ranks.frame(answer))
                        case ranks.Drop(digest):
                            self._prepared.pop(digest, None)

    def _prepare(self, ref: AdapterRef) -> str:
        """Read an adapter; return what is wrong with it, which does not end the replica."""
        try:
            self._prepared[ref.digest] = self._adapters.prepare(ref)
        except BatonError as known:
            return known.message
        except Exception as fault:  # noqa: BLE001 - reported to the leader
            return f"adapter {ref.name}: {type(fault).__name__}: {fault}"
        return ""


class Rank:
    """A rank that has loaded its part of the model: orders in, parts of tensors out."""

    def __init__(
        self, model: Decoder, adapters: CpuAdapters, desk: AdapterDesk, pool_fd: int
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._desk = desk
        self._pool_fd = pool_fd

    def run(self, first: ranks.OpenPool, orders: Iterator[ranks.Order]) -> None:
        """Execute the leader's orders until it ends."""
        runner = self._open(first)
        for order in orders:
            match order:
                case ranks.OpenPool():
                    runner = self._open(order)
                case ranks.Adapt(ref):
                    self._adapters.add(ref, self._desk.take(ref.digest))
                case ranks.Drop(digest):
                    self._adapters.remove(digest)
                case ranks.Forward():
                    rows = [row.plan_row() for row in order.rows]
                    runner.follow(rows, isolated=order.isolated)
                case ranks.CopyBlocks(blocks):
                    runner.copy_blocks(blocks)
                case ranks.Clear():
                    runner.clear([row.plan_row() for row in order.rows])
                case ranks.ComputeLogits():
                    self._model.follow_logits(order.rows)

    def _open(self, order: ranks.OpenPool) -> CpuRunner:
        geometry = order.geometry
        shard = self._model.shard
        held = geometry if shard is None else shard.held(geometry)
        pool = map_pool(self._pool_fd, held) if order.shared else own_pool(held)
        runner = CpuRunner(
            self._model,
            pool,
            geometry,
            AttentionTiling(*order.tiling),
            adapters=self._adapters,
            shared_pool=order.shared,
        )
        give_back()
        return runner


def serve(
    number: int,
    leader: socket.socket,
    loader: socket.socket,
    pool_fd: int,
    store: str,
    settings: EngineSettings,
) -> None:
    """Join the group, load on the leader's order, then execute its orders until it ends."""
    torch.set_num_threads(settings.threads)
    choose_native(settings.native)
    leader.sendall(ranks.frame(ranks.Started()))
    group = Group(number, settings.tensor_parallel, store)
    artifact = resolve_model(settings.model)
    shard = Shard(artifact.config, number, group, own_pools=settings.own_pools)
    numerics = numerics_of(settings.numerics)
    dtype = DTYPES[settings.dtype]
    adapters = CpuAdapters(artifact.config, dtype, numerics, settings.max_adapter_rank, shard)
    desk = AdapterDesk(loader, adapters)
    orders = orders_of(leader)
    if not isinstance(next(orders, None), ranks.LoadWeights):
        return  # the leader ended
    model = _load(artifact, settings, numerics, shard)
    leader.sendall(ranks.frame(ranks.WeightsLoaded()))
    shard.wait_loaded()
    first = next(orders, None)
    if isinstance(first, ranks.OpenPool):
        Rank(model, adapters, desk, pool_fd).run(first, orders)


def orders_of(leader: socket.socket) -> Iterator[ranks.Order]:
    """Yield the leader's orders until it ends."""
    reader = FrameReader(msgspec.msgpack.Decoder(list[ranks.Order]))
    while data := leader.recv(1 << 20):
        yield from reader.feed(data)


@torch.inference_mode()
def _load(
    artifact: ModelArtifact, settings: EngineSettings, numerics: Numerics, shard: Shard
) -> Decoder:
    model = load_model(
        artifact,
        settings.dtype,
        numerics,
        quantisation=settings.weight_quantisation,
        shard=shard,
    )
    if numerics == "exact":
        for linear in model.linears().values():
            linear.check()
    return model


def main() -> None:
    """Run ``python -m baton.engine.cpu.parallel.rank``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the shell decides
    number, socket_fd, loader_fd, pool_fd, store, encoded = sys.argv[1:]
    leader = socket.socket(fileno=int(socket_fd))
    loader = socket.socket(fileno=int(loader_fd))
    settings = msgspec.json.decode(encoded, type=EngineSettings)
    try:
        serve(int(number), leader, loader, int(pool_fd), store, settings)
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)  # the leader ended
    except Exception as error:  # the process edge: report, then fail loudly
        message = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"rank {number} failed: {message}\n")
        with contextlib.suppress(OSError):
            leader.sendall(ranks.frame(ranks.Failed(message)))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
