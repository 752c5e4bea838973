"""One rank of a tensor-parallel replica: it computes its part of every pass, and plans nothing.

    python -m engine.cpu.parallel.rank RANK SOCKET_FD LOADER_FD POOL_FD STORE SETTINGS_JSON

``SOCKET_FD`` and ``LOADER_FD`` are ends of Unix socket pairs to the leader
(``engine/cpu/parallel/rank_processes.py``): its orders, and adapters to be read beside them.
``POOL_FD`` is the memory file of the KV pool, ``STORE`` the file in which the ranks find each
other. The process ends when the leader does, when its group breaks, and with exit code 1 when it
cannot go on.
"""

import contextlib
import mmap
import signal
import socket
import sys
import threading

import msgspec
import torch

from engine.artifacts.artifact import ModelArtifact, resolve_model
from engine.core.errors import BatonError
from engine.core.params import AdapterRef
from engine.cpu.attention import AttentionTiling
from engine.cpu.load import load_model
from engine.cpu.lora import CpuAdapters
from engine.cpu.parallel import rank_processes as ranks
from engine.cpu.parallel.shard import Group, Shard
from engine.cpu.runner import CpuRunner
from engine.ipc import die_with_parent
from engine.loading.memory import give_back_memory
from engine.models.lora import Adapter
from engine.numerics import DTYPES, Numerics
from engine.settings import EngineSettings


class Rank:
    """Orders in, parts of tensors out.

    Args:
        number: This rank, from 1.
        leader: This end of the socket pair for orders.
        loader: This end of the socket pair for adapters.
        pool_fd: The memory file for the KV pool.
        settings: Of the engine.
    """

    def __init__(
        self,
        number: int,
        leader: socket.socket,
        loader: socket.socket,
        pool_fd: int,
        settings: EngineSettings,
    ) -> None:
        self._number = number
        self._leader = leader
        self._loader = loader
        self._prepared: dict[str, Adapter] = {}  # read, and not yet held
        self._pool_fd = pool_fd
        self._settings = settings
        self._numerics: Numerics = "fast" if settings.numerics == "fast" else "exact"

    def run(self, store: str) -> None:
        """Do what the leader says until it goes."""
        torch.set_num_threads(self._settings.threads)
        self._leader.sendall(ranks.frame(ranks.Started()))
        group = Group(self._number, self._settings.tensor_parallel, store, torch.device("cpu"))
        artifact = resolve_model(self._settings.model)
        self._shard = Shard(artifact.config, self._number, group)
        self._adapters = CpuAdapters(
            artifact.config,
            DTYPES[self._settings.dtype],
            self._numerics,
            self._settings.max_adapter_rank,
            self._shard,
        )
        threading.Thread(target=self._read_adapters, daemon=True).start()
        reader = ranks.order_reader()
        while data := self._leader.recv(1 << 20):
            for order in reader.feed(data):
                match order:
                    case ranks.Load():
                        self._load(artifact)
                    case ranks.Open():
                        self._open(order)
                    case ranks.Adapt():
                        ref = order.ref
                        self._adapters.add(ref, self._prepared.pop(ref.digest))
                    case ranks.Drop():
                        self._adapters.remove(order.digest)
                    case ranks.Forward():
                        rows = [row.plan_row() for row in order.rows]
                        self._runner.follow(rows, isolated=order.isolated)
                    case ranks.Logits():
                        self._model.follow_logits(order.rows)

    def _read_adapters(self) -> None:
        """Beside the steps, until the leader goes."""
        reader = ranks.loader_reader()
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
        """What was wrong with the adapter; that is its own fault, and the replica lives on."""
        try:
            self._prepared[ref.digest] = self._adapters.prepare(ref)
        except BatonError as known:
            return known.message
        except Exception as fault:  # noqa: BLE001 - said to the leader
            return f"adapter {ref.name}: {type(fault).__name__}: {fault}"
        return ""

    def _load(self, artifact: ModelArtifact) -> None:
        settings = self._settings
        with torch.inference_mode():
            self._model = load_model(
                artifact,
                settings.dtype,
                self._numerics,
                quantisation=settings.weight_quantisation,
                shard=self._shard,
            )
            if self._numerics == "exact":
                for linear in self._model.linears().values():
                    linear.check()
        self._leader.sendall(ranks.frame(ranks.Loaded()))
        self._shard.wait_loaded()

    def _open(self, order: ranks.Open) -> None:
        geometry = order.geometry
        if order.shared:
            pool = memoryview(mmap.mmap(self._pool_fd, geometry.pool_bytes))
        else:
            pool = memoryview(bytearray(geometry.pool_bytes))
        tiling = AttentionTiling(*order.tiling)
        self._runner = CpuRunner(
            self._model,
            pool,
            geometry,
            tiling,
            adapters=self._adapters,
            shared_pool=order.shared,
        )
        give_back_memory()


def main() -> None:
    """Entry of ``python -m engine.cpu.parallel.rank``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the shell decides
    number, socket_fd, loader_fd, pool_fd, store, encoded = sys.argv[1:]
    leader, loader = socket.socket(fileno=int(socket_fd)), socket.socket(fileno=int(loader_fd))
    settings = msgspec.json.decode(encoded, type=EngineSettings)
    try:
        Rank(int(number), leader, loader, int(pool_fd), settings).run(store)
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)  # the leader is gone
    except Exception as error:  # the process edge: report, then fail loudly
        message = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"rank {number} failed: {message}\n")
        with contextlib.suppress(OSError):
            leader.sendall(ranks.frame(ranks.Failed(message)))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
