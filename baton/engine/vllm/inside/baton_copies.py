"""Copies between vLLM's blocks and the pages of the pool: a class for each kind of device.

    CpuCopies     blocks ── copy ──▶ pages, done when the call returns
    CudaCopies    blocks ── gather ──▶ pinned buffers ── thread ──▶ pages, beside vLLM's steps

``CudaCopies`` was never run on a GPU. It has a stream for each direction. Both begin behind an
event of the stream on which vLLM computes: a save reads what the step has written, and a load
writes when no earlier step writes into its blocks any more. Each direction has two pinned buffers,
so that one travels while the thread copies the other. A buffer has arrived with its event.

The bytes of a head in a block are copied as they are: page p has the p-th part of them, beside
those of the other heads. So a page does not depend on the number of ranks that fill it. ``order``
names the order of a head's bytes, which must be equal for the two workers of a hand-off.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

_BUFFER_BYTES = 16 << 20
_FLASH = "FLASH_ATTN"

Ended = Callable[[Exception | None], None]


def copies_of(device_type: str) -> "type[CpuCopies | CudaCopies]":
    """Return the class for a kind of device.

    Raises:
        NotImplementedError: There is none.
    """
    if device_type not in _KINDS:
        raise NotImplementedError(
            f"hand_off: baton copies from {' and '.join(_KINDS)}, not {device_type}"
        )
    return _KINDS[device_type]


class CpuCopies:
    """Copies on CPUs.

    Args:
        layers: Blocks of each layer as bytes, ``[blocks, heads, tokens, bytes]``.
        pool: Pages as bytes, ``[layers, 2, pages, heads, bytes]``.
    """

    in_background = False  # saves have ended when ``save`` returns

    def __init__(self, layers: list[torch.Tensor], pool: torch.Tensor) -> None:
        self._layers = layers
        self._pool = pool

    @staticmethod
    def layers_and_order(
        caches: dict[str, torch.Tensor], vllm_config: Any, kv_cache_config: Any
    ) -> tuple[list[torch.Tensor], str]:
        """Return the blocks of each layer as bytes, and the name of the order in a head.

        Raises:
            NotImplementedError: They have another shape than this class copies.
        """
        first = next(iter(caches.values()))
        for cache in caches.values():
            if cache.shape != first.shape or not cache.is_contiguous() or cache.dim() != 4:
                raise _unequal(cache)
        _, _, tokens, values = first.shape
        kind = vllm_config.cache_config.cache_dtype
        layers = [cache.view(torch.uint8) for cache in caches.values()]
        return layers, _get_attn_isa(first.dtype, tokens, values // 2, kind)

    def mark(self) -> None:
        """Do nothing: all that vLLM has started has ended."""

    def save(self, blocks: list[int], pages: list[int], layers: slice, ended: Ended) -> None:
        """Copy some layers of blocks into pages."""
        rows, columns = torch.tensor(blocks), torch.tensor(pages)
        for layer, of_layer in zip(self._layers[layers], self._pool[layers], strict=True):
            _write(of_layer, columns, layer[rows])
        ended(None)

    def load(self, blocks: list[int], pages: list[int], mark: None) -> None:
        """Copy pages into blocks."""
        rows, columns = torch.tensor(blocks), torch.tensor(pages)
        for layer, of_layer in zip(self._layers, self._pool, strict=True):
            layer[rows] = _read(of_layer, columns, layer[: len(rows)].shape)

    def wait_for_saves(self) -> None:
        """Do nothing: all saves have ended."""

    def close(self) -> None:
        """Do nothing: there is no thread."""


class CudaCopies:
    """Copies on a GPU, for KV of vLLM's FlashAttention.

    Args:
        layers: Blocks of each layer as bytes, ``[blocks, heads, tokens, bytes]``, on the GPU.
        pool: Pages as bytes, ``[layers, 2, pages, heads, bytes]``.
        cuda: Module with streams and events.
    """

    in_background = True  # blocks must be held until the future of ``save`` is done

    def __init__(
        self, layers: list[torch.Tensor], pool: torch.Tensor, cuda: Any = torch.cuda
    ) -> None:
        self._tokens_first = not layers[0].is_contiguous()
        self._layers = [self._turned(layer) for layer in layers]  # in the order of the memory
        self._pool = pool
        self._cuda = cuda
        self._device = layers[0].device
        self._piece = max(_BUFFER_BYTES // layers[0][0].numel(), 1)  # blocks of a buffer
        shape = (self._piece, *self._layers[0].shape[1:])
        self._saved = [_pinned(shape), _pinned(shape)]
        self._loaded = [_pinned(shape), _pinned(shape)]
        self._save_stream = cuda.Stream(self._device)
        self._load_stream = cuda.Stream(self._device)
        self._saver = ThreadPoolExecutor(1, "baton-save")
        self._saving: set[Future[None]] = set()

    @staticmethod
    def layers_and_order(
        caches: dict[str, torch.Tensor], vllm_config: Any, kv_cache_config: Any
    ) -> tuple[list[torch.Tensor], str]:
        """Return the blocks of each layer as bytes, and the name of the order in a head.

        Raises:
            NotImplementedError: They have another shape than this class copies.
        """
        backends = {one.get_name() for one in get_current_attn_backends(vllm_config, list(caches))}
        if backends != {_FLASH}:
            raise NotImplementedError(
                f"hand_off: baton copies KV of {_FLASH} on GPUs, not {', '.join(sorted(backends))}"
            )
        kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        if kinds != ["FullAttentionSpec"]:  # a running request may lose blocks of others
            raise NotImplementedError(
                f"hand_off: baton copies KV of full attention on GPUs, not {', '.join(kinds)}"
            )
        first = next(iter(caches.values()))
        for cache in caches.values():
            if cache.dim() != 4 or cache.shape != first.shape or cache.stride() != first.stride():
                raise _unequal(cache)
        if not (first.is_contiguous() or first.transpose(1, 2).is_contiguous()):
            raise NotImplementedError(
                "hand_off: baton copies KV in the layouts LBNHC and LBHNC of vLLM, not "
                f"{tuple(first.shape)} with strides {first.stride()}"
            )
        return [cache.view(torch.uint8) for cache in caches.values()], _FLASH

    def mark(self) -> Any:
        """Return an event behind all that vLLM has started on its stream."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def save(
        self, blocks: list[int], pages: list[int], layers: slice, ended: Ended
    ) -> Future[None]:
        """Start to copy some layers of blocks into pages, in the order of the calls.

        Args:
            blocks: Blocks that vLLM has filled, or will have filled by what it has started.
            pages: Their pages.
            layers: Layers to copy.
            ended: Called in a thread: with None when the pages have the bytes, or with the error.
        """
        save = self._saver.submit(self._save, blocks, pages, layers, self.mark(), ended)
        self._saving.add(save)
        save.add_done_callback(self._saving.discard)
        return save

    def load(self, blocks: list[int], pages: list[int], mark: Any) -> None:
        """Copy pages into blocks after the event ``mark``, and return when the blocks have them."""
        self._load_stream.wait_event(mark)
        sent: list[Any] = []
        try:
            for number, (layer, of_layer, rows, columns) in enumerate(self._pieces(blocks, pages)):
                if number > 1:
                    sent[number - 2].synchronize()  # its buffer is used again
                buffer = self._loaded[number % 2][: len(rows)]
                turned = self._turned(buffer)
                turned.copy_(_read(of_layer, columns, turned.shape))
                with self._cuda.stream(self._load_stream):
                    layer[rows.to(self._device)] = buffer.to(self._device, non_blocking=True)
                    sent.append(self._recorded(self._load_stream))
        finally:
            for event in sent[-2:]:
                event.synchronize()

    def wait_for_saves(self) -> None:
        """Wait until all started saves have ended, before vLLM uses their blocks again."""
        wait(tuple(self._saving))

    def close(self) -> None:
        """End the thread that saves."""
        self._saver.shutdown()

    def _save(
        self, blocks: list[int], pages: list[int], layers: slice, mark: Any, ended: Ended
    ) -> None:
        try:
            self._copy_out(blocks, pages, layers, mark)
        except Exception as error:
            ended(error)
            raise
        ended(None)

    def _copy_out(self, blocks: list[int], pages: list[int], layers: slice, mark: Any) -> None:
        self._save_stream.wait_event(mark)
        before: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any] | None = None
        pieces = self._pieces(blocks, pages, layers)
        for number, (layer, of_layer, rows, columns) in enumerate(pieces):
            buffer = self._saved[number % 2][: len(rows)]
            with self._cuda.stream(self._save_stream):
                buffer.copy_(layer[rows.to(self._device)], non_blocking=True)
                event = self._recorded(self._save_stream)
            self._write_arrived(before)
            before = of_layer, columns, buffer, event
        self._write_arrived(before)

    def _write_arrived(
        self, piece: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any] | None
    ) -> None:
        """Write a buffer into its pages when it has arrived."""
        if piece is not None:
            of_layer, columns, buffer, event = piece
            event.synchronize()
            _write(of_layer, columns, self._turned(buffer))

    def _turned(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return blocks with their heads before their tokens, or in the order of the memory."""
        return blocks.transpose(1, 2) if self._tokens_first else blocks

    def _pieces(
        self, blocks: list[int], pages: list[int], layers: slice = slice(None)
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return layer, its pages, blocks and page numbers of copies that fit into a buffer."""
        per_block = len(pages) // len(blocks)
        parts = [
            (torch.tensor(some), torch.tensor(pages[at * per_block :][: len(some) * per_block]))
            for at in range(0, len(blocks), self._piece)
            if (some := blocks[at : at + self._piece])
        ]
        copied = zip(self._layers[layers], self._pool[layers], strict=True)
        for (layer, of_layer), (rows, columns) in itertools.product(copied, parts):
            yield layer, of_layer, rows, columns

    def _recorded(self, stream: Any) -> Any:
        event = self._cuda.Event(blocking=True)  # a thread sleeps until it arrives
        event.record(stream)
        return event


_KINDS: dict[str, type[CpuCopies | CudaCopies]] = {"cpu": CpuCopies, "cuda": CudaCopies}


def _write(of_layer: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor) -> None:
    """Write blocks, ``[blocks, heads, tokens, bytes]``, into the pages of a layer."""
    count, heads = blocks.shape[:2]
    parts = blocks.reshape(count, heads, len(pages) // count, 2, -1)  # of each page and its halves
    of_layer[:, pages] = parts.permute(3, 0, 2, 1, 4).reshape(2, len(pages), heads, -1)


def _read(of_layer: torch.Tensor, pages: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return blocks of a shape ``[blocks, heads, tokens, bytes]`` from the pages of a layer."""
    count, heads = shape[:2]
    parts = of_layer[:, pages].view(2, count, len(pages) // count, heads, -1)
    return parts.permute(1, 3, 2, 0, 4).reshape(shape)


def _pinned(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


def _unequal(cache: torch.Tensor) -> NotImplementedError:
    return NotImplementedError(
        "hand_off: baton copies KV of equal layers [blocks, heads, tokens, K and V], not "
        f"{tuple(cache.shape)}"
    )
