"""One rank of a tensor-parallel replica: it computes its part of every pass, and plans nothing.

    python -m engine.rank RANK SOCKET_FD POOL_FD STORE SETTINGS_JSON

``SOCKET_FD`` is one end of a Unix socket pair to the leader (``engine/ranks.py``), ``POOL_FD`` the
memory file of the KV pool, ``STORE`` the file in which the ranks find each other. The process ends
when the leader does, when its group breaks, and with exit code 1 when it cannot go on.
"""

import contextlib
import mmap
import signal
import socket
import sys

import msgspec
import torch

from engine import ranks
from engine.adapters import AdapterSet
from engine.attention import Layout
from engine.core.adapters import AdapterRef
from engine.core.errors import AdapterLoadError
from engine.footprint import give_back_memory
from engine.ipc import EngineSettings
from engine.loading import load_model
from engine.numerics import DTYPES, Numerics
from engine.parallel import Group, Shard
from engine.process import die_with_parent
from engine.runner import TorchRunner
from engine.text.artifact import ModelArtifact, resolve_model


class Rank:
    """Orders in, parts of tensors out.

    Args:
        number: This rank, from 1.
        leader: This end of the socket pair.
        pool_fd: The memory file for the KV pool.
        settings: Of the engine.
    """

    def __init__(
        self, number: int, leader: socket.socket, pool_fd: int, settings: EngineSettings
    ) -> None:
        self._number = number
        self._leader = leader
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
        self._adapters = AdapterSet(
            artifact.config,
            DTYPES[self._settings.dtype],
            self._numerics,
            self._settings.max_adapter_rank,
            self._shard,
        )
        reader = ranks.order_reader()
        while data := self._leader.recv(1 << 20):
            for order in reader.feed(data):
                match order:
                    case ranks.Load():
                        self._load(artifact)
                    case ranks.Open():
                        self._open(order)
                    case ranks.Adapt():
                        self._adapt(order.ref)
                    case ranks.Drop():
                        self._adapters.remove(order.digest)
                    case ranks.Forward():
                        rows = [row.plan_row() for row in order.rows]
                        self._runner.follow(rows, isolated=order.isolated)
                    case ranks.Logits():
                        self._model.follow_logits(order.rows)

    def _adapt(self, ref: AdapterRef) -> None:
        problem = ""
        try:
            self._adapters.add(ref, self._adapters.prepare(ref))
        except AdapterLoadError as error:  # the adapter's fault: the replica lives on
            problem = error.message
        self._leader.sendall(ranks.frame(ranks.Adapted(problem)))

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
        layout = Layout(*order.layout)
        self._runner = TorchRunner(
            self._model,
            pool,
            geometry,
            layout,
            adapters=self._adapters,
            shared_pool=order.shared,
        )
        give_back_memory()


def main() -> None:
    """Entry of ``python -m engine.rank``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the shell decides
    number, socket_fd, pool_fd, store, encoded = sys.argv[1:]
    leader = socket.socket(fileno=int(socket_fd))
    settings = msgspec.json.decode(encoded, type=EngineSettings)
    try:
        Rank(int(number), leader, int(pool_fd), settings).run(store)
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
