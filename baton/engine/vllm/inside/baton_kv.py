"""KV connector of vLLM 0.32 for ``hand_off: baton``: copies between vLLM's blocks and pages.

    prefill    vLLM computes a prompt ── save ──▶ pages ──▶ transports of Baton, which verify
    decode     transports of Baton ──▶ pages ── load ──▶ vLLM computes the rest of the prompt

The pages are the KV pool that the worker's shell has mapped: ``[layer, k|v, page, bytes]``. A block
of vLLM fills several pages. The bytes of a block are copied as they are, because the attention
backend orders them for its kernels: page p has the p-th part of them. So only whole blocks move.

Requests name their pages in ``kv_transfer_params``: ``save_pages`` has one for each page of the
whole blocks of the prompt, and ``load_pages`` the same, from ``first_token`` on.

With chunked prefill a prompt takes several engine steps. The blocks that a step has filled are
saved when it ends, and a datagram reports them, so that they travel while the next step computes. A
page is written once, as it may be read from then on.

A cancelled load may still run when its pages belong to another request. So a file has the
generation of each page, and a load fails unless that is its own when the bytes are copied.
"""

import contextlib
import mmap
import os
import socket
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

_LOG = init_logger(__name__)
_PAGE_TOKENS = 16
_SAVED = struct.Struct("<qq")  # generation of a hand-off, pages of its prompt that are saved


@dataclass
class Copy:
    """Blocks of vLLM and the pages of the pool that have their bytes."""

    request_id: str
    blocks: list[int]
    pages: list[int]
    generation: int
    end: int = 0  # pages of the prompt that are saved with this copy


@dataclass
class Step(KVConnectorMetadata):
    """Copies of one engine step: loads begin with it, saves are done when it ends."""

    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)


class BatonConnector(KVConnectorBase_V1):
    """Connector of one vLLM on CPUs, without tensor parallelism."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._saving: dict[str, Any] = {}  # requests by id, until their prompt is computed
        self._saved: dict[
            str, int
        ] = {}  # pages of a prompt that are saved, or will be in this step
        self._loads: list[Copy] = []  # for the next step
        self._layers: list[torch.Tensor] = []  # bytes of vLLM's blocks, one row for each
        self._pool = torch.empty(0)
        self._generations = torch.empty(0)  # by page
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reports.setblocking(False)
        self._loading: dict[str, Future[None]] = {}
        self._loader = ThreadPoolExecutor(1, "baton-load")
        self._reports_path = ""

    # ---------------------------------------------------------------- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens to load behind the cached ones, unless a gap would be between them."""
        parameters = request.kv_transfer_params or {}
        pages = parameters.get("load_pages")
        if not pages or num_computed_tokens < parameters["first_token"]:
            return 0, False
        end = parameters["first_token"] + len(pages) * _PAGE_TOKENS
        more = max(end - num_computed_tokens, 0)
        return more, more > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note what to load or save for a request that has its blocks."""
        parameters = request.kv_transfer_params or {}
        if parameters.get("save_pages"):
            self._saving[request.request_id] = request
        pages = parameters.pop("load_pages", None)  # loaded once: after a preemption they are gone
        if not num_external_tokens:
            return
        end = parameters["first_token"] + len(pages) * _PAGE_TOKENS
        (ids,) = blocks.get_block_ids()
        own = ids[(end - num_external_tokens) // self._block_tokens : end // self._block_tokens]
        pages = pages[-(num_external_tokens // _PAGE_TOKENS) :]
        self._loads.append(Copy(request.request_id, own, pages, parameters["generation"]))

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """Return the copies of the step: loads, and the blocks of prompts that the step fills."""
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
        step = Step(loads=self._loads)
        self._loads = []
        for name, request in list(self._saving.items()):
            if name not in computed:
                continue
            end = computed[name] + scheduler_output.num_scheduled_tokens[name]
            copy = self._next_save(request, end)
            if copy is not None:
                step.saves.append(copy)
            if end >= request.num_prompt_tokens:
                del self._saving[name]
        return step

    def _next_save(self, request: Any, end_token: int) -> Copy | None:
        """Return the copy of the whole blocks up to ``end_token`` that are not saved yet."""
        name = request.request_id
        parameters = request.kv_transfer_params
        pages_per_block = self._block_tokens // _PAGE_TOKENS
        first = self._saved.get(name, 0)
        end = min(end_token // self._block_tokens * pages_per_block, len(parameters["save_pages"]))
        if end <= first:
            return None
        self._saved[name] = end
        (ids,) = self._kv_cache_manager.get_block_ids(name)
        blocks = ids[first // pages_per_block : end // pages_per_block]
        pages = parameters["save_pages"][first:end]
        return Copy(name, blocks, pages, parameters["generation"], end)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return that the prompt was saved, as a part of the response."""
        unfinished = self._saving.pop(request.request_id, None)
        saved = self._saved.pop(request.request_id, 0)
        if unfinished is not None or not saved:
            return False, None
        return False, {"saved_tokens": request.num_prompt_tokens}

    # ---------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Map the pool, and write the order of the bytes in a block into the worker's folder.

        Raises:
            NotImplementedError: This vLLM's KV has another shape than this connector copies.
        """
        caches = list(kv_caches.values())
        first = caches[0]
        layout = "[blocks, heads, tokens, K and V]"
        for cache in caches:
            if cache.device.type != "cpu":
                raise NotImplementedError(f"hand_off: baton copies from CPUs, not {cache.device}")
            if cache.shape != first.shape or not cache.is_contiguous() or cache.dim() != 4:
                raise NotImplementedError(
                    f"hand_off: baton copies KV of equal layers {layout}, not {cache.shape}"
                )
        count, _, tokens, values = first.shape
        self._layers = [cache.view(torch.uint8).view(count, -1) for cache in caches]
        pages = count * tokens // _PAGE_TOKENS
        half_bytes = self._layers[0].shape[1] * _PAGE_TOKENS // tokens // 2
        shape = (len(caches), 2, pages, half_bytes)
        size = len(caches) * 2 * pages * half_bytes
        extra = self._kv_transfer_config.kv_connector_extra_config
        descriptor = os.open(extra["pool"], os.O_RDWR)
        try:
            os.ftruncate(descriptor, size)
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._pool = torch.frombuffer(mapped, dtype=torch.uint8).view(shape)
        path = extra["generations"]
        self._generations = torch.from_file(path, shared=True, size=pages, dtype=torch.long)
        kind = self._vllm_config.cache_config.cache_dtype
        order = _get_attn_isa(first.dtype, self._block_tokens, values // 2, kind)
        Path(extra["order"]).write_text(order)
        self._reports_path = extra["saves"]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of the step in a thread."""
        for copy in self._step.loads:
            self._loading[copy.request_id] = self._loader.submit(self._load, copy)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM computes nothing of a request before it is loaded as a whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are saved when the step ends."""

    def wait_for_save(self) -> None:
        """Save the blocks that this step has filled, and report them."""
        for copy in self._step.saves:
            self._save(copy)
            with contextlib.suppress(OSError):  # the response reports what no datagram did
                self._reports.sendto(_SAVED.pack(copy.generation, copy.end), self._reports_path)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the loads that have ended."""
        results = KVConnectorTransferResults()
        for name, loading in list(self._loading.items()):
            if not loading.done():
                continue
            del self._loading[name]
            results.finished_recving.add(name)
            if error := loading.exception():
                _LOG.error("cannot load KV of request %s: %s", name, error)
                results.failed_recving.add(name)
        return results

    def shutdown(self) -> None:
        """End the thread that loads, and close the socket."""
        self._loader.shutdown()
        self._reports.close()

    @property
    def _step(self) -> Step:
        step = self._get_connector_metadata()
        return step if isinstance(step, Step) else Step()

    def _save(self, copy: Copy) -> None:
        blocks = torch.tensor(copy.blocks, dtype=torch.long)
        pages = torch.tensor(copy.pages, dtype=torch.long)
        half_bytes = self._pool.shape[-1]
        for layer, of_layer in zip(self._layers, self._pool, strict=True):
            parts = layer[blocks].view(len(copy.pages), 2, half_bytes)
            of_layer[:, pages] = parts.transpose(0, 1)

    def _load(self, copy: Copy) -> None:
        blocks = torch.tensor(copy.blocks, dtype=torch.long)
        pages = torch.tensor(copy.pages, dtype=torch.long)
        for layer, of_layer in zip(self._layers, self._pool, strict=True):
            layer[blocks] = of_layer[:, pages].transpose(0, 1).reshape(len(copy.blocks), -1)
        if bool((self._generations[pages] != copy.generation).any()):
            raise RuntimeError("its pages were given to another request")
