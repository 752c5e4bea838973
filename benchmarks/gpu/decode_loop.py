"""Decode steps that the host does not wait for: tokens, positions and tables stay on the device.

launch()   step n      forward ─ sample ─ tokens and positions advance ─ copy out ┐
launch()   step n + 1  forward ─ ...     (begins before n is read)                │
read()     tokens of step n  ◀────────────────────────────────────────────────────┘
"""

from collections import deque
from collections.abc import Sequence

import torch

from baton.engine.cuda.decode_graphs import DecodeRow, DecodeSteps, cuda_graphs
from baton.engine.cuda.decoder import CudaDecoder


class DecodeLoop:
    """Decodes one batch at a time; without ``graphs``, each step is launched kernel by kernel."""

    def __init__(self, decoder: CudaDecoder, max_blocks: int, *, graphs: bool = True) -> None:
        capture = cuda_graphs() if graphs and decoder.device.type == "cuda" else None
        self._steps = DecodeSteps(decoder, max_blocks, capture=capture)
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    @property
    def pending(self) -> int:
        """Number of steps launched and not read."""
        return len(self._pending)

    def start(self, rows: Sequence[DecodeRow]) -> None:
        """Begin a batch, without waiting for the device."""
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} steps have not been read")
        self._steps.start(rows)

    def launch(self) -> None:
        """Enqueue a step of the batch, which stores its KV and samples one token per row."""
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
        """Return the tokens of the oldest unread step; -1 = NaN or Inf in that row's logits."""
        host, event = self._pending.popleft()
        if event is not None:
            event.synchronize()
        tokens: list[int] = host.tolist()
        return tokens
