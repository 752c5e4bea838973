"""One decode step for all rows of a batch, on the device: forward, logits, sample, advance.

A step is one CUDA graph. Common buckets (rows, items of attention) are captured at the start, the
others when they are first used. Without graphs (in Triton's interpreter) the same code runs
directly. Results do not depend on the bucket: padding rows belong to no sequence, and the number of
splits to merge follows from the position.
"""

# ruff: noqa: N806 - suffixes such as x_TE give shapes

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.cuda.decoder import Batch, CudaDecoder
from baton.engine.cuda.kernels.attention import Tiles, list_items
from baton.engine.cuda.kernels.rows import sample_tokens
from baton.engine.cuda.upload import Packing, upload

_COMMON_ROWS = 256
_COMMON_TOKENS = 4096  # mean context of a batch up to which steps are captured at the start


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A decoding sequence. ``seed`` is unsigned; temperature 0 is greedy."""

    token: int
    position: int
    blocks: Sequence[int]
    temperature: float = 0.0
    seed: int = 0
    choice: int = 0


class _State:
    """Inputs and outputs of a step, for one bucket of rows R.

    All inputs but the block tables lie in one piece of memory, so a batch begins with one copy.
    """

    def __init__(self, rows: int, max_blocks: int, hidden: int, device: torch.device) -> None:
        self.rows = rows
        self._packing = Packing(
            {
                "tokens": ((rows,), torch.int64),
                "seeds": ((rows,), torch.int64),
                "choices": ((rows,), torch.int64),
                "temperatures": ((rows,), torch.float64),
                "positions": ((rows,), torch.int32),
                "sequences": ((rows,), torch.int32),
                "used": ((rows,), torch.int32),  # 1 = a real row
                "tiles": ((5, rows), torch.int32),
            }
        )
        self.inputs = torch.zeros(self._packing.size_bytes, dtype=torch.uint8, device=device)
        views = self._packing.views(self.inputs)
        self.tokens_R = views["tokens"]
        self.seeds_R = views["seeds"]
        self.choices_R = views["choices"]
        self.temperatures_R = views["temperatures"]
        self.positions_R = views["positions"]
        self.sequences_R = views["sequences"]
        self.used_R = views["used"]
        self.tiles_5R = views["tiles"]
        self.tables_RB = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.hidden_RE = torch.zeros(rows, hidden, device=device)
        self.sampled_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables: list[list[int]] = [[] for _ in range(rows)]  # contents of tables_RB

    def fill(self, rows: Sequence[DecodeRow]) -> None:
        count = len(rows)
        tiles_5R = np.zeros((5, self.rows), dtype=np.int32)  # row, used, position, sequence, item
        tiles_5R[0] = np.arange(self.rows)
        tiles_5R[1, :count] = 1
        tiles_5R[2, :count] = [row.position for row in rows]
        tiles_5R[3] = -1
        tiles_5R[3, :count] = np.arange(count)
        numbers_3R = np.zeros((3, self.rows), dtype=np.int64)
        numbers_3R[0, :count] = [row.token for row in rows]
        numbers_3R[1, :count] = [signed(row.seed) for row in rows]
        numbers_3R[2, :count] = [signed(row.choice) for row in rows]
        temperatures_R = np.zeros(self.rows)
        temperatures_R[:count] = [row.temperature for row in rows]
        values = {
            "tokens": numbers_3R[0],
            "seeds": numbers_3R[1],
            "choices": numbers_3R[2],
            "temperatures": temperatures_R,
            "positions": tiles_5R[2],
            "sequences": tiles_5R[3],
            "used": tiles_5R[1],
            "tiles": tiles_5R,
        }
        parts = {name: torch.from_numpy(array) for name, array in values.items()}
        self._packing.send(parts, self.inputs)
        self.fill_tables([row.blocks for row in rows])

    def fill_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """Copy the tables that changed: after a step, those of sequences with a new block."""
        changed = [i for i, table in enumerate(tables) if table != self.tables[i]]
        if not changed:
            return
        width = max(len(tables[i]) for i in changed)
        padded = [[*tables[i], *[0] * (width - len(tables[i]))] for i in changed]
        parts = {
            "tables": torch.tensor(padded, dtype=torch.int32),
            "places": torch.tensor(changed),
        }
        on_device = upload(self.tables_RB.device, parts)
        self.tables_RB[:, :width].index_copy_(0, on_device["places"], on_device["tables"])
        for i in changed:
            self.tables[i] = list(tables[i])


def rows_bucket(rows: int) -> int:
    """Return the padded number of rows: 1, 2, 4, then multiples of 8, above 64 of 32."""
    if rows <= 4:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return -(-rows // step) * step


def items_bucket(items: int, rows: int) -> int:
    """Return the padded number of items of ``rows`` rows: 2, 4, 8 ... for each row."""
    per_row = -(-items // rows)
    return rows << max((per_row - 1).bit_length(), 1)


Replay = Callable[[], None]
Capture = Callable[[Replay], Replay]
"""Records a function that enqueues work on the device, and returns one that replays the record."""


def cuda_graphs() -> Capture:
    """Return a function that captures CUDA graphs, which share their memory."""
    memory = torch.cuda.graph_pool_handle()

    def capture(enqueue: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            enqueue()
        return graph.replay

    return capture


class DecodeSteps:
    """Steps of one batch at a time, one token per row.

    Args:
        capture: How steps are captured; ``None``: each step is launched kernel by kernel.
    """

    def __init__(
        self, decoder: CudaDecoder, max_blocks: int, *, capture: Capture | None = None
    ) -> None:
        self._decoder = decoder
        self._max_blocks = max_blocks
        self._capture = capture
        self._states: dict[int, _State] = {}
        self._replays: dict[tuple[int, int], Replay] = {}
        self._rows = 0
        self._longest = 0
        self._room = 0
        self._positions: list[int] = []  # of the next step

    @torch.inference_mode()
    def prepare(self, max_rows: int, progress: Callable[[str], None]) -> int:
        """Capture the steps of batches of up to ``max_rows`` (at most 256) and common lengths.

        Captured later, a step would delay the responses of its batch.

        Returns:
            The number of captured steps.
        """
        if self._capture is None:
            return 0
        limit = min(self._decoder.shape.max_context_tokens, _COMMON_TOKENS)
        splits = -(-limit // self._decoder.decode_config.split)
        per_row = [0, *(1 << n for n in range(1, (splits - 1).bit_length() + 1))]
        most = min(max_rows, _COMMON_ROWS)
        for rows in sorted({rows_bucket(count) for count in range(1, most + 1)}):
            progress(f"capturing decode steps of {rows} rows")
            state = self._state_of(rows)
            state.fill([])
            for count in per_row:
                self._captured(self._capture, state, rows * count)
        return len(self._replays)

    @property
    def sampled_R(self) -> torch.Tensor:  # noqa: N802 - a shape
        """Tokens of the last step, until the next one; -1 = NaN or Inf in that row's logits."""
        return self._state.sampled_R[: self._rows]

    @property
    def hidden_RE(self) -> torch.Tensor:  # noqa: N802 - a shape
        """Rows of ``CudaDecoder.forward`` in the last step, until the next one."""
        return self._state.hidden_RE[: self._rows]

    @torch.inference_mode()
    def start(self, rows: Sequence[DecodeRow]) -> None:
        """Begin a batch, without waiting for the device."""
        self._state = self._state_of(rows_bucket(len(rows)))
        self._rows = len(rows)
        self._positions = [row.position for row in rows]
        self._longest = max(self._positions) + 1
        self._measure_room([row.blocks for row in rows])
        self._state.fill(rows)

    @torch.inference_mode()
    def resume(self, tables: Sequence[Sequence[int]]) -> None:
        """Continue the batch of the last step, each row behind its sampled token.

        Args:
            tables: Block tables of the rows. Those that changed are copied to the device; all else
                is there.
        """
        self._measure_room(tables)
        self._state.fill_tables(tables)

    def _measure_room(self, tables: Sequence[Sequence[int]]) -> None:
        """Note the longest length that the batch may have when its first table is full."""
        widest = max(map(len, tables))
        if widest > self._max_blocks:
            raise ValueError(f"a block table has {widest} blocks, limit {self._max_blocks}")
        size = self._decoder.block_tokens
        pairs = zip(tables, self._positions, strict=True)
        self._room = self._longest - 1 + min(len(t) * size - p for t, p in pairs)

    def _state_of(self, bucket: int) -> _State:
        state = self._states.get(bucket)
        if state is None:
            hidden = self._decoder.shape.hidden_size
            device = self._decoder.device
            state = self._states[bucket] = _State(bucket, self._max_blocks, hidden, device)
        return state

    @torch.inference_mode()
    def step(self) -> None:
        """Enqueue a step of the batch, which stores its KV and samples one token per row.

        Raises:
            ValueError: The longest sequence has reached the context, or its block table's end.
        """
        self._decoder.check_position(self._longest - 1)
        if self._longest > self._room:
            raise ValueError(f"position {self._longest - 1} is beyond the sequence's blocks")
        split = self._decoder.decode_config.split
        items = 0
        if self._longest > split:
            needed = sum(position // split + 1 for position in self._positions)
            items = items_bucket(needed, self._state.rows)
        if self._capture is not None:
            self._captured(self._capture, self._state, items)()
        else:
            self._compute(self._state, items)
        self._longest += 1
        self._positions = [position + 1 for position in self._positions]

    def _captured(self, capture: Capture, state: _State, items: int) -> Replay:
        """Return a captured step.

        A run before the capture compiles the kernels. Its changes of the inputs are undone, and the
        KV that it stores is stored again by the step.
        """
        key = (state.rows, items)
        if key not in self._replays:
            before = state.inputs.clone()
            self._compute(state, items)
            state.inputs.copy_(before)
            self._replays[key] = capture(lambda: self._compute(state, items))
        return self._replays[key]

    def _compute(self, state: _State, items: int) -> None:
        """Enqueue a step over ``items`` items; 0: each row's keys fit into one split."""
        decoder = self._decoder
        config = decoder.decode_config
        items_2I = None
        if items:
            items_2I = torch.empty(2, items, dtype=torch.int32, device=decoder.device)
            list_items(state.tiles_5R, items_2I, config.split)
        batch = Batch(
            state.tokens_R,
            state.positions_R,
            state.sequences_R,
            state.tables_RB,
            ((Tiles(state.tiles_5R, items_2I, 1), config),),
            state.sequences_R,  # unused: all rows are sampled
        )
        x_RE = decoder.forward(batch)
        logits_RV = decoder.logits(x_RE)
        next_R = (state.positions_R + 1).to(torch.int64)
        token_R = sample_tokens(
            logits_RV, state.temperatures_R, state.seeds_R, state.choices_R, next_R
        )
        finite_R = torch.isfinite(logits_RV.sum(dim=-1))
        state.hidden_RE.copy_(x_RE)
        state.sampled_R.copy_(token_R.masked_fill(~finite_R, -1))
        state.tokens_R.copy_(token_R)
        state.positions_R.add_(state.used_R)
        state.tiles_5R[2].add_(state.used_R)


def signed(value: int) -> int:
    """Return the 64 bits of an unsigned number as a signed one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
