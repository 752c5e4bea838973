"""Tensor parallelism: every product is split by its outputs, and whole results are gathered.

    x [T, E] whole on every rank
      qkv product, attention     by heads         gather ─▶ attention output whole
      output projection          columns of E     gather ─▶ added to x, whole
      gate and up, activation    columns of F     gather ─▶ activation whole
      down projection            columns of E     gather ─▶ added to x, whole
      experts                    as gate, up and down; the router is whole on every rank
      LM head                    rows of V        gather at the leader

Nothing is ever summed over ranks. So each number is the same dot product, over all of its inputs
and in the same order, as on one rank. Bits are equal by construction, as long as a product's
columns do not depend on how many others are computed with them, which
``baton/engine/cpu/parallel/selftest.py`` proves at start. Splitting the inputs instead (the usual
row-parallel half) would add partial sums in another order; it moves as many bytes.

The leader has the embedding table and broadcasts the rows of a step; ranks need no token ids.
"""

# ruff: noqa: N803, N806 - suffixes such as q_THD give shapes

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch._C._distributed_c10d import (
    AllgatherOptions,
    BroadcastOptions,
    FileStore,
    GatherOptions,
    ProcessGroupGloo,
    Store,
    Work,
)

from baton.engine.core.plan import PlanRow
from baton.engine.cpu.attention import AttentionTiling
from baton.engine.cpu.linear import Linear
from baton.engine.cpu.parallel.rank_processes import (
    GROUP_BROKE,
    LOAD_TIMEOUT_S,
    STEP_TIMEOUT_S,
    Adapt,
    Clear,
    ComputeLogits,
    CopyBlocks,
    Drop,
    Forward,
    LoadWeights,
    OpenPool,
    RankError,
    RankProcesses,
    RankRow,
    Started,
    WeightsLoaded,
)
from baton.engine.models.split import local_config, splits_of
from baton.model.artifact import ModelConfig
from baton.types.geometry import KvGeometry
from baton.types.params import AdapterRef

LEADER = 0

_T = TypeVar("_T")


class Group:
    """Collectives between the ranks of one replica, by gloo.

    All ranks make every call, in the same order. No process-wide default group is set.

    Args:
        store: Path of a file in which they find each other.
        explain: Makes a more precise error of a broken collective, if possible.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        store: str,
        explain: Callable[[Exception], RankError] | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self._explain = explain or _broken
        patience = timedelta(seconds=LOAD_TIMEOUT_S)
        try:
            self._store = FileStore(store, ranks)
            self._store.set_timeout(patience)
            self._group = _backend(self._store, rank, ranks, patience)
        except RuntimeError as error:
            raise self._explain(error) from error
        self._patience = patience

    def begin_steps(self) -> None:
        """Apply the timeout of steps to collectives from here on."""
        self._patience = timedelta(seconds=STEP_TIMEOUT_S)

    def gather(self, part_TN: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return ``[T, widths[rank]]`` of every rank, side by side, on every rank."""
        rows = part_TN.shape[0]
        widest = max(widths)
        sent = _widened(part_TN, widest)
        got = sent.new_empty(self.ranks * rows, widest)
        options = AllgatherOptions()
        options.timeout = self._patience
        self._wait(self._group._allgather_base(got, sent, options))  # noqa: SLF001
        return _side_by_side(got.view(self.ranks, rows, widest), widths)

    def gather_at_leader(self, part_TN: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Gather as ``gather`` does at the leader; the other ranks get an empty tensor."""
        rows = part_TN.shape[0]
        widest = max(widths)
        sent = _widened(part_TN, widest)
        options = GatherOptions()
        options.rootRank = LEADER
        options.timeout = self._patience
        if self.rank != LEADER:
            self._wait(self._group.gather([], [sent], options))
            return sent.new_empty(0)
        got = sent.new_empty(self.ranks, rows, widest)
        self._wait(self._group.gather([list(got)], [sent], options))
        return _side_by_side(got, widths)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace the tensor's values by the leader's."""
        options = BroadcastOptions()
        options.rootRank = LEADER
        options.timeout = self._patience
        self._wait(self._group.broadcast([tensor], options))

    def _wait(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._explain(error) from error


def _broken(cause: Exception) -> RankError:
    return RankError(f"{GROUP_BROKE}: {str(cause).splitlines()[0]}")


def _backend(store: Store, rank: int, ranks: int, patience: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - the only way to name an interface
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    options._timeout = patience  # noqa: SLF001
    return gloo(store, rank, ranks, options)


def _widened(part_TN: torch.Tensor, width: int) -> torch.Tensor:
    """Return the part contiguous, and padded to the widest part."""
    missing = width - part_TN.shape[1]
    return F.pad(part_TN, (0, missing)) if missing else part_TN.contiguous()


def _side_by_side(got_RTN: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    ranks, rows, widest = got_RTN.shape
    if min(widths) == widest:
        return got_RTN.transpose(0, 1).reshape(rows, ranks * widest)
    return torch.cat([got_RTN[r, :, :width] for r, width in enumerate(widths)], dim=1)


def lead(config: ModelConfig, ranks: RankProcesses, *, own_pools: bool = False) -> "Shard":
    """Return the leader's shard, with its group connected."""
    splits_of(config, ranks.count)  # raises before any rank waits
    ranks.wait_until(Started)  # the group would wait for a rank that dies before it joins
    group = Group(LEADER, ranks.count, ranks.store, ranks.failure)
    return Shard(config, LEADER, group, ranks, own_pools=own_pools)


class Shard:
    """Part of a model in one rank, and its connection to the others.

    Args:
        own_pools: Whether each rank has its own KV pool, with its heads only.
    """

    def __init__(
        self,
        config: ModelConfig,
        rank: int,
        group: Group,
        others: RankProcesses | None = None,
        *,
        own_pools: bool = False,
    ) -> None:
        self.splits = splits_of(config, group.ranks)
        self.split = self.splits[rank]
        self.group = group
        self.tilings: Sequence[AttentionTiling] = ()  # of all ranks, at the leader
        self._others = others
        self._own_pools = own_pools
        self.config = config
        self._heads = [len(s.heads) * config.head_dim for s in self.splits]
        self._feed = [len(s.feed) for s in self.splits]
        self._hidden = [len(s.hidden) for s in self.splits]
        self._vocab = [len(s.vocab) for s in self.splits]

    @property
    def is_leader(self) -> bool:
        """True if this rank plans and samples."""
        return self._others is not None

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the numbers of this rank's part."""
        return local_config(config, self.split)

    def held(self, geometry: KvGeometry) -> KvGeometry:
        """Return the pool that this rank writes: all of it, or its own heads."""
        if not self._own_pools:
            return geometry
        return msgspec.structs.replace(geometry, num_kv_heads=len(self.split.kv_heads))

    @property
    def heads_in_pool(self) -> range | None:
        """KV heads of this rank in the pool that it writes; None: all heads of the pool."""
        return None if self._own_pools else self.split.kv_heads

    def rows(self, name: str) -> slice:
        """Return the rows of a weight (canonical name) that this rank reads: its outputs."""
        s = self.split
        dim = self.config.head_dim
        kind = name.rsplit(".", 1)[-1]
        if kind in ("embed", "head"):
            return self._vocabulary(kind)
        pieces = {"q": (s.heads, dim), "k": (s.kv_heads, dim), "v": (s.kv_heads, dim)}
        pieces |= {"gate": (s.feed, 1), "up": (s.feed, 1), "sinks": (s.heads, 1)}
        pieces |= {f"{split}_bias": piece for split, piece in pieces.items()}
        pieces |= {"o": (s.hidden, 1), "down": (s.hidden, 1)}  # biases are added to whole results
        if kind not in pieces:  # norms, a router: whole on every rank
            return slice(None)
        piece, size = pieces[kind]
        return slice(piece.start * size, piece.stop * size)

    def _vocabulary(self, kind: str) -> slice:
        """Return vocabulary rows: all for the leader, else this rank's part of the head."""
        if self.is_leader:
            return slice(None)
        is_head = kind == "head" or self.config.tie_word_embeddings
        return slice(self.split.vocab.start, self.split.vocab.stop) if is_head else slice(0, 0)

    def head_part(self, rows_VE: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the LM head, from the rows that it read."""
        vocab = self.split.vocab
        return rows_VE[vocab.start : vocab.stop] if self.is_leader else rows_VE

    def load(self) -> None:
        """Order the ranks to read their weights."""
        if self._others is not None:
            self._others.send(LoadWeights())

    def wait_loaded(self) -> None:
        """Wait until all have them; then the timeout of steps applies."""
        if self._others is not None:
            self._others.wait_until(WeightsLoaded)
        self.group.begin_steps()

    def open(
        self, geometry: KvGeometry, tiling: AttentionTiling, *, shared: bool
    ) -> AttentionTiling:
        """Order the ranks to use a pool, shared or for a self-test; return our tiling."""
        if self._others is None:
            return tiling
        for rank, part in enumerate(self.tilings[1:], 1):
            fields = (part.unit, part.tile, part.align, part.decode_rows)
            self._others.send(OpenPool(geometry, fields, shared), rank)
        return self.tilings[0]

    def forward(self, rows: Sequence[PlanRow], *, isolated: bool) -> None:
        """Order the ranks to begin a pass."""
        if self._others is not None:
            self._others.send(Forward([RankRow.of(row) for row in rows], isolated))

    def begin_copies(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Order ranks with own pools to copy blocks, as the leader does; then ``settle``."""
        if self._others is not None and self._own_pools:
            self._others.send(CopyBlocks(list(blocks)))

    def begin_clear(self, rows: Sequence[PlanRow]) -> None:
        """Order ranks with own pools to zero what rows wrote; then ``settle``."""
        if self._others is not None and self._own_pools:
            self._others.send(Clear([RankRow.of(row) for row in rows]))

    def settle(self) -> None:
        """Wait until all pools have executed the order: their pages may be reused next."""
        if self._own_pools:
            self.group.gather_at_leader(torch.zeros(1, 1), [1] * self.group.ranks)

    def prepare_adapter(self, ref: AdapterRef, own: Callable[[], _T]) -> _T:
        """Read this rank's part of an adapter by ``own``; the leader has the others read theirs.

        Call this from one thread only, beside the steps.

        Raises:
            AdapterLoadError: A rank could not read it; then no rank keeps it.
            RankError: A rank is gone.
        """
        return own() if self._others is None else self._others.prepare(ref, own)

    def adapt(self, ref: AdapterRef) -> None:
        """Order the ranks to use an adapter that all have read."""
        if self._others is not None:
            self._others.send(Adapt(ref))

    def drop(self, digest: str) -> None:
        """Order the ranks to drop an adapter."""
        if self._others is not None:
            self._others.send(Drop(digest))

    def embedding(self, tokens_T: torch.Tensor, table_VE: torch.Tensor) -> torch.Tensor:
        """Return ``[T, E]`` from the leader's table."""
        if self.is_leader:
            rows_TE = F.embedding(tokens_T, table_VE)
        else:
            rows_TE = table_VE.new_empty(tokens_T.shape[0], self.config.hidden_size)
        self.group.broadcast(rows_TE)
        return rows_TE

    def heads(self, part: torch.Tensor) -> torch.Tensor:
        """Return the attention output of all heads.

        Once this returns, all ranks have stored the layer's KV: each sends after it.
        """
        return self.group.gather(part, self._heads)

    def project(
        self, product: Callable[[torch.Tensor], torch.Tensor], name: str, x: torch.Tensor
    ) -> torch.Tensor:
        """Compute a product of a layer: whole inputs, and whole outputs where they are summed.

        ``qkv`` and ``gate_up`` stay split; their results are gathered later.
        """
        kind = name.rpartition(".")[2]
        if kind == "down":
            x = self.group.gather(x, self._feed)
        y = product(x)
        return self.group.gather(y, self._hidden) if kind in ("o", "down") else y

    def logits(self, head: Linear, h_SE: torch.Tensor) -> torch.Tensor:
        """Return ``[S, V]`` at the leader; elsewhere ``h_SE`` gives the shape and is filled."""
        if self._others is not None:
            self._others.send(ComputeLogits(h_SE.shape[0]))
        self.group.broadcast(h_SE)
        return self.group.gather_at_leader(head(h_SE), self._vocab)
