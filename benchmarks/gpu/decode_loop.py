"""Decode steps without the host between them: the device keeps the tokens, positions and tables.

launch()   step n      forward ─ draw ─ tokens and positions move on ─ copy out ┐
launch()   step n + 1  forward ─ ...     (begins before anybody has read n)     │
read()     tokens of step n  ◀──────────────────────────────────────────────────┘
"""

from collections import deque
from collections.abc import Sequence

import torch

from baton.engine.cuda.decode_graphs import DecodeRow, DecodeSteps
from baton.engine.cuda.decoder import CudaDecoder


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
        self._steps = DecodeSteps(decoder, max_blocks, graphs=graphs)
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    @property
    def captured(self) -> int:
        """Graphs captured so far."""
        return self._steps.captured

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
        self._steps.start(rows)

    def launch(self) -> None:
        """Enqueue one step of the batch: its KV is written and one token per row is drawn.

        Raises:
            ValueError: The longest sequence has reached the context, or its block table's end.
        """
        self._steps.step()
        drawn = self._steps.sampled_R
        if not drawn.is_cuda:
            self._pending.append((drawn.clone(), None))
            return
        host = torch.empty(drawn.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(drawn, non_blocking=True)
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
