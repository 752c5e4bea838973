"""Decode steps without the host between them: the device keeps the tokens, positions and tables.

    launch()   step n      forward ─ draw ─ tokens and positions move on ─ copy out ┐
    launch()   step n + 1  forward ─ ...     (begins before anybody has read n)     │
    read()     tokens of step n  ◀──────────────────────────────────────────────────┘

A step is one CUDA graph, captured when its bucket (rows, splits) is first used. Buckets do not show
in the results: rows that only pad belong to no sequence, and how many splits are merged is read
from the position.
"""

# ruff: noqa: N806, N815 - suffixes such as x_TE give shapes

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.cuda import Batch, CudaDecoder
from engine.kernels.attention import Tiles
from engine.kernels.rows import draw


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence that decodes. ``seed`` is unsigned; temperature 0 is greedy."""

    token: int
    position: int
    blocks: Sequence[int]
    temperature: float = 0.0
    seed: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class _State:
    """What a step reads and moves on, for one bucket of rows R."""

    tokens_R: torch.Tensor
    positions_R: torch.Tensor
    sequences_R: torch.Tensor
    tables_RB: torch.Tensor
    tiles_4R: torch.Tensor
    temperatures_R: torch.Tensor
    seeds_R: torch.Tensor
    choices_R: torch.Tensor
    drawn_R: torch.Tensor
    used_R: torch.Tensor  # int32, 1 = a real row


def rows_bucket(rows: int) -> int:
    """Rows that a batch is padded to: 1, 2, 4, then multiples of 8, above 64 of 32."""
    if rows <= 4:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return -(-rows // step) * step


def splits_bucket(splits: int) -> int:
    """Splits that the grid is padded to: powers of two."""
    return 1 << (splits - 1).bit_length()


class DecodeLoop:
    """Decodes one batch at a time.

    Args:
        decoder: Model and pool.
        max_blocks: Widest block table of a sequence.
        graphs: Capture steps as CUDA graphs; by default on CUDA.
    """

    def __init__(
        self, decoder: CudaDecoder, max_blocks: int, *, graphs: bool | None = None
    ) -> None:
        self._decoder = decoder
        self._max_blocks = max_blocks
        self._cuda = decoder.device.type == "cuda"
        self._use_graphs = self._cuda if graphs is None else graphs
        self._states: dict[int, _State] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._use_graphs else None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._rows = 0
        self._longest = 0
        self._room = 0

    @property
    def captured(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    @property
    def pending(self) -> int:
        """Steps launched and not read."""
        return len(self._pending)

    def start(self, rows: Sequence[DecodeRow]) -> None:
        """Take up a batch; nothing waits for the device.

        Raises:
            RuntimeError: Steps of the batch before have not been read.
            ValueError: A block table is wider than ``max_blocks``.
        """
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} steps have not been read")
        widest = max(len(row.blocks) for row in rows)
        if widest > self._max_blocks:
            raise ValueError(f"a table has {widest} blocks, the limit is {self._max_blocks}")
        bucket = rows_bucket(len(rows))
        state = self._states.get(bucket)
        if state is None:
            state = self._states[bucket] = self._make_state(bucket)
        self._state, self._rows = state, len(rows)
        self._longest = max(row.position for row in rows) + 1
        size = self._decoder.block_tokens
        spare = min(len(row.blocks) * size - row.position for row in rows)
        self._room = self._longest + spare - 1  # of ``_longest``, when the first sequence is full
        pad = bucket - len(rows)
        used = [1] * len(rows) + [0] * pad
        index = [i if here else -1 for i, here in enumerate(used)]
        positions = [row.position for row in rows] + [0] * pad
        self._fill(state.tokens_R, [row.token for row in rows] + [0] * pad)
        self._fill(state.positions_R, positions)
        self._fill(state.sequences_R, index)
        self._fill(state.used_R, used)
        self._fill(state.tiles_4R, [list(range(bucket)), used, positions, index])
        self._fill(state.temperatures_R, [row.temperature for row in rows] + [0.0] * pad)
        self._fill(state.seeds_R, [_signed(row.seed) for row in rows] + [0] * pad)
        self._fill(state.choices_R, [row.choice for row in rows] + [0] * pad)
        table = torch.zeros(len(rows), self._max_blocks, dtype=torch.int32)
        for i, row in enumerate(rows):
            table[i, : len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)
        self._fill(state.tables_RB[: len(rows)], table)

    def launch(self) -> None:
        """Enqueue one step of the batch: its KV is written and one token per row is drawn.

        Raises:
            ValueError: The longest sequence has reached the context, or its block table's end.
        """
        self._decoder.check_position(self._longest - 1)
        if self._longest > self._room:
            raise ValueError(f"position {self._longest - 1} is beyond the sequence's blocks")
        split = self._decoder.decode_config.split
        splits = splits_bucket(-(-self._longest // split))
        if self._use_graphs:
            self._replay(splits)
        else:
            self._step(self._state, splits)
        self._longest += 1
        drawn_R = self._state.drawn_R[: self._rows]
        if not self._cuda:
            self._pending.append((drawn_R.clone(), None))
            return
        host = torch.empty(self._rows, dtype=torch.int64, pin_memory=True)
        host.copy_(drawn_R, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((host, event))

    def read(self) -> list[int]:
        """Tokens of the oldest step that was not read; -1 = NaN or Inf in that row's logits."""
        host, event = self._pending.popleft()
        if event is not None:
            event.synchronize()
        tokens: list[int] = host.tolist()
        return tokens

    def _replay(self, splits: int) -> None:
        key = (self._state.tokens_R.shape[0], splits)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(splits)
        graph.replay()

    def _capture(self, splits: int) -> "torch.cuda.CUDAGraph":
        """Record a step. Compiling and measuring happen in a run before, whose effects are undone.

        That run writes KV of the step to come, which the step then writes again.
        """
        state = self._state
        saved = [tensor.clone() for tensor in _moved(state)]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(state, splits)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, before in zip(_moved(state), saved, strict=True):
            tensor.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):  # one at a time: they share memory
            self._step(state, splits)
        return graph

    @torch.inference_mode()
    def _step(self, state: _State, splits: int) -> None:
        decoder = self._decoder
        batch = Batch(
            state.tokens_R,
            state.positions_R,
            state.sequences_R,
            state.tables_RB,
            ((Tiles(state.tiles_4R, splits, 1), decoder.decode_config),),
        )
        logits_RV = decoder.logits(decoder.forward(batch))
        next_R = (state.positions_R + 1).to(torch.int64)
        token_R = draw(logits_RV, state.temperatures_R, state.seeds_R, state.choices_R, next_R)
        finite_R = torch.isfinite(logits_RV.sum(dim=-1))
        state.drawn_R.copy_(torch.where(finite_R, token_R, -1))
        state.tokens_R.copy_(token_R)
        state.positions_R.add_(state.used_R)
        state.tiles_4R[2].add_(state.used_R)

    def _make_state(self, bucket: int) -> _State:
        device = self._decoder.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return _State(
            tokens_R=zeros(bucket),
            positions_R=zeros(bucket, dtype=torch.int32),
            sequences_R=zeros(bucket, dtype=torch.int32),
            tables_RB=zeros(bucket, self._max_blocks, dtype=torch.int32),
            tiles_4R=zeros(4, bucket, dtype=torch.int32),
            temperatures_R=zeros(bucket, dtype=torch.float64),
            seeds_R=zeros(bucket),
            choices_R=zeros(bucket),
            drawn_R=zeros(bucket),
            used_R=zeros(bucket, dtype=torch.int32),
        )

    def _fill(self, target: torch.Tensor, values: object) -> None:
        """Copy from fresh pinned memory: a shared buffer could be overwritten while it is read."""
        host = torch.as_tensor(values, dtype=target.dtype)
        if self._cuda:
            host = host.pin_memory()
        target.copy_(host, non_blocking=True)


def _moved(state: _State) -> tuple[torch.Tensor, ...]:
    return state.tokens_R, state.positions_R, state.tiles_4R, state.drawn_R


def _signed(seed: int) -> int:
    """The 64 bits of an unsigned seed as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
