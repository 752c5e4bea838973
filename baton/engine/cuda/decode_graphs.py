"""One decode step for all rows of a batch, on the device: forward, logits, sample, advance.

A step is one CUDA graph, captured when its bucket (rows, splits) is first used. Without graphs (in
Triton's interpreter) the same code runs directly. Results do not depend on the bucket: padding rows
belong to no sequence, and the number of splits to merge follows from the position.
"""

# ruff: noqa: N806 - suffixes such as x_TE give shapes

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.engine.cuda.decoder import Batch, CudaDecoder
from baton.engine.cuda.kernels.attention import Tiles
from baton.engine.cuda.kernels.rows import sample_tokens

_ALIGNED_BYTES = 256  # alignment of each part of the inputs: kernels are compiled by alignment


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
        kinds = {
            "tokens": (1, torch.int64),
            "seeds": (1, torch.int64),
            "choices": (1, torch.int64),
            "temperatures": (1, torch.float64),
            "positions": (1, torch.int32),
            "sequences": (1, torch.int32),
            "used": (1, torch.int32),  # 1 = a real row
            "tiles": (4, torch.int32),
        }
        self._places: dict[str, tuple[int, int, torch.dtype]] = {}
        end = 0
        for name, (count, kind) in kinds.items():
            size = count * rows * kind.itemsize
            self._places[name] = (end, size, kind)
            end += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self.inputs = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tokens_R = self._part(self.inputs, "tokens")
        self.seeds_R = self._part(self.inputs, "seeds")
        self.choices_R = self._part(self.inputs, "choices")
        self.temperatures_R = self._part(self.inputs, "temperatures")
        self.positions_R = self._part(self.inputs, "positions")
        self.sequences_R = self._part(self.inputs, "sequences")
        self.used_R = self._part(self.inputs, "used")
        self.tiles_4R = self._part(self.inputs, "tiles").view(4, rows)
        self.tables_RB = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.hidden_RE = torch.zeros(rows, hidden, device=device)
        self.sampled_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables: list[list[int]] = [[] for _ in range(rows)]  # contents of tables_RB

    def _part(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        begin, size, kind = self._places[name]
        return memory[begin : begin + size].view(kind)

    def fill(self, rows: Sequence[DecodeRow]) -> None:
        pad = self.rows - len(rows)
        used = [1] * len(rows) + [0] * pad
        index = [i if is_used else -1 for i, is_used in enumerate(used)]
        positions = [row.position for row in rows] + [0] * pad
        values = {
            "tokens": [row.token for row in rows] + [0] * pad,
            "seeds": [signed(row.seed) for row in rows] + [0] * pad,
            "choices": [signed(row.choice) for row in rows] + [0] * pad,
            "temperatures": [row.temperature for row in rows] + [0.0] * pad,
            "positions": positions,
            "sequences": index,
            "used": used,
            "tiles": [*range(self.rows), *used, *positions, *index],
        }
        # fresh pinned memory: a reused buffer could be overwritten while it is read
        on_cuda = self.inputs.is_cuda
        host = torch.zeros(self.inputs.shape, dtype=torch.uint8, pin_memory=on_cuda)
        for name, numbers in values.items():
            self._part(host, name).copy_(torch.tensor(numbers, dtype=self._places[name][2]))
        self.inputs.copy_(host, non_blocking=True)
        self._fill_tables([list(row.blocks) for row in rows])

    def _fill_tables(self, tables: list[list[int]]) -> None:
        changed = [i for i, table in enumerate(tables) if table != self.tables[i]]
        if not changed:
            return
        width = max(len(tables[i]) for i in changed)
        padded = [tables[i] + [0] * (width - len(tables[i])) for i in changed]
        host = torch.tensor(padded, dtype=torch.int32)
        places = torch.tensor(changed)
        if self.tables_RB.is_cuda:
            host = host.pin_memory()
            places = places.pin_memory()
        device = self.tables_RB.device
        self.tables_RB[:, :width].index_copy_(
            0, places.to(device, non_blocking=True), host.to(device, non_blocking=True)
        )
        for i in changed:
            self.tables[i] = tables[i]


def rows_bucket(rows: int) -> int:
    """Return the padded number of rows: 1, 2, 4, then multiples of 8, above 64 of 32."""
    if rows <= 4:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return -(-rows // step) * step


def splits_bucket(splits: int) -> int:
    """Return the padded number of splits: powers of two."""
    return 1 << (splits - 1).bit_length()


class DecodeSteps:
    """Steps of one batch at a time, one token per row.

    Args:
        graphs: Whether to capture steps as CUDA graphs; by default on CUDA.
    """

    def __init__(
        self, decoder: CudaDecoder, max_blocks: int, *, graphs: bool | None = None
    ) -> None:
        self._decoder = decoder
        self._max_blocks = max_blocks
        self._use_graphs = decoder.device.type == "cuda" if graphs is None else graphs
        self._states: dict[int, _State] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._use_graphs else None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._rows = 0
        self._longest = 0
        self._room = 0

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
        widest = max(len(row.blocks) for row in rows)
        if widest > self._max_blocks:
            raise ValueError(f"a block table has {widest} blocks, limit {self._max_blocks}")
        bucket = rows_bucket(len(rows))
        state = self._states.get(bucket)
        if state is None:
            hidden = self._decoder.shape.hidden_size
            device = self._decoder.device
            state = self._states[bucket] = _State(bucket, self._max_blocks, hidden, device)
        self._state = state
        self._rows = len(rows)
        self._longest = max(row.position for row in rows) + 1
        size = self._decoder.block_tokens
        spare = min(len(row.blocks) * size - row.position for row in rows)
        self._room = self._longest + spare - 1  # ``_longest`` when the first sequence is full
        state.fill(rows)

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
        splits = splits_bucket(-(-self._longest // split))
        if self._use_graphs:
            self._replay(splits)
        else:
            self._compute(self._state, splits)
        self._longest += 1

    def _replay(self, splits: int) -> None:
        key = (self._state.rows, splits)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(splits)
        graph.replay()

    def _capture(self, splits: int) -> "torch.cuda.CUDAGraph":
        """Record a step, after a run that compiles and tunes, and whose effects are undone.

        That run stores KV of the coming step, which the step then stores again.
        """
        state = self._state
        before = state.inputs.clone()
        self._compute(state, splits)
        state.inputs.copy_(before)
        graph = torch.cuda.CUDAGraph()
        # one at a time: they share memory; other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._compute(state, splits)
        return graph

    def _compute(self, state: _State, splits: int) -> None:
        decoder = self._decoder
        batch = Batch(
            state.tokens_R,
            state.positions_R,
            state.sequences_R,
            state.tables_RB,
            ((Tiles(state.tiles_4R, splits, 1), decoder.decode_config),),
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
        state.tiles_4R[2].add_(state.used_R)


def signed(value: int) -> int:
    """Return the 64 bits of an unsigned number as a signed one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
