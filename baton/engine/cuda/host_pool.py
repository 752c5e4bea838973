"""Copies of KV blocks between the device's pool and the one in host memory.

    host ──blocks in ``StepPlan.written``──▶ device        before a step
    host ◀──blocks that a step finished───── device        beside the end of a step

The worker's shell (``baton/engine/process/client.py``) reads and writes pages in shared memory.
It sends the pages of finished prompts and of the prefix cache, and receives those of other workers.
So each block goes to the host once, when its last token is computed. The end of a sequence, a block
that is not full, goes there only in steps that publish KV. A plan names the blocks that arrived in
host memory since the last plan; all others are as the device left them.

The host's pool is registered with the driver, which pins all of it, and a kernel copies to and from
it. Copies to the host run on a separate stream, so the CPU copies nothing and can read the sampled
tokens meanwhile.
"""

import weakref
from collections.abc import Iterable, Sequence

import torch
import triton

from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.cuda.kernels.device import blocks as device
from baton.engine.cuda.upload import upload
from baton.engine.numerics import NumericsSetupError
from baton.model.artifact import ModelError

_TILE = 2048  # elements
_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HostPool:
    """Copies blocks between both pools.

    Args:
        host: Pool ``[L, 2, blocks, token, K, D]`` in host memory, registered during this object's
            life.
        device: The same on the device; on the CPU a second tensor (interpreter).

    Raises:
        ModelError: The driver cannot register the host's pool.
    """

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host = host
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._written: torch.cuda.Event | None = None
        if device.is_cuda:
            _register(host)
            # before the memory is freed: its address may be used again
            weakref.finalize(self, _unregister, host.data_ptr()).atexit = False
            self._stream = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]

    def before(self, plan: StepPlan) -> None:
        """Copy the blocks that arrived in host memory, then make the plan's copies."""
        if plan.written:
            self._copy(self._host, self._device, plan.written, plan.written)
        if plan.copies:
            sources, targets = zip(*plan.copies, strict=True)
            self._copy(self._device, self._device, sources, targets)

    def after(self, rows: Iterable[PlanRow], *, ends: bool) -> None:
        """Start to copy the rows' finished blocks to the host, and with ``ends`` all their blocks.

        ``wait`` must follow before the host's pages are read.
        """
        blocks = self.touched(rows, ends=ends)
        if not blocks:
            return
        if self._stream is None:
            self._copy(self._device, self._host, blocks, blocks)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(self._device, self._host, blocks, blocks)
            self._written = self._stream.record_event()

    def wait(self) -> None:
        """Wait until the host has the blocks of ``after``."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None

    def verify(self) -> None:
        """Prove that blocks arrive on both sides; the first two blocks are zero afterwards.

        Raises:
            NumericsSetupError: A block arrived with other bits.
        """
        pattern = torch.arange(1, self._host[:, :, :2].numel() + 1).remainder_(251)
        pattern = pattern.view(self._host[:, :, :2].shape).to(self._host.dtype)
        size = self._host.shape[3]
        row = PlanRow(sequence_id=0, tokens=[0] * 2 * size, start=0, block_ids=[0, 1])
        self._device[:, :, :2] = pattern.to(self._device.device)
        self.after([row], ends=False)
        self.wait()
        arrived = torch.equal(self._host[:, :, :2], pattern)
        self._host[:, :, :2] = pattern.flip(0)
        self.before(StepPlan((row,), written=(0, 1)))
        arrived &= torch.equal(self._device[:, :, :2].to("cpu"), pattern.flip(0))
        self._device[:, :, :2] = 0
        self._host[:, :, :2] = 0
        if not arrived:
            raise NumericsSetupError("KV blocks change on the way between the GPU and host memory")

    def clear(self, rows: Sequence[PlanRow]) -> None:
        """Zero the KV that the rows stored, in both pools."""
        size = self._host.shape[3]
        slots = [
            row.block_ids[position // size] * size + position % size
            for row in rows
            for position in range(row.start, row.start + len(row.tokens))
        ]
        tokens = self._device.view(*self._device.shape[:2], -1, *self._device.shape[4:])
        slots_on_device = upload(tokens.device, {"slots": torch.tensor(slots)})["slots"]
        tokens.index_fill_(2, slots_on_device, 0.0)
        self.after(rows, ends=True)

    def touched(self, rows: Iterable[PlanRow], *, ends: bool) -> list[int]:
        """Return the blocks to which the rows' tokens belong; without ``ends`` only full ones."""
        size = self._host.shape[3]
        blocks: list[int] = []
        for row in rows:
            first = row.start // size
            end = row.start + len(row.tokens)
            last = -(-end // size) if ends else end // size
            if last > first:
                blocks += row.block_ids[first:last]
        return blocks

    @staticmethod
    def _copy(
        source: torch.Tensor, target: torch.Tensor, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Enqueue copies of blocks on the current stream."""
        layers, two, _, *block = source.shape
        width = block[0] * block[1] * block[2]
        on_device = source if source.is_cuda else target
        ids = torch.tensor(list(sources) + list(targets), dtype=torch.int32)
        blocks = upload(on_device.device, {"blocks": ids})["blocks"]
        grid = (len(sources), layers * two, triton.cdiv(width, _TILE))
        device.copy_blocks_kernel[grid](
            source,
            target,
            blocks,
            len(sources),
            source.shape[2],
            target.shape[2],
            width,
            TILE=_TILE,
            num_warps=4,
        )


def _register(host: torch.Tensor) -> None:
    """Make host memory accessible to the device, at its own address."""
    size = host.numel() * host.itemsize
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(host.data_ptr(), size, _PORTABLE_AND_MAPPED))
    if error != 0:
        raise ModelError(
            f"cudaHostRegister of the KV pool of {size / 1e9:.1f} GB in host memory failed with "
            f"CUDA error {error}: lower kv_blocks_per_worker, or raise the memory limit of the "
            "container and the limit of locked memory (ulimit -l)"
        )


def _unregister(pointer: int) -> None:
    torch.cuda.synchronize()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(pointer)
