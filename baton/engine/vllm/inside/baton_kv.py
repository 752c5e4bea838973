"""KV connector of vLLM 0.32 for ``hand_off: baton``: copies between vLLM's blocks and pages.

    prefill    vLLM computes a prompt ── save ──▶ pages ──▶ transports of Baton, which verify
    decode     transports of Baton ──▶ pages ── load ──▶ vLLM computes the rest of the prompt

The pages are the KV pool that the worker's shell has mapped: ``[layer, k|v, page, head, bytes]``. A
block of vLLM fills several pages. The bytes of a head are copied as they are, because the attention
backend orders them for its kernels, see ``baton_copies.py``. So only whole blocks move.

With tensor parallelism each rank has this connector, and copies its own KV heads. A page has the
heads of all ranks in order, so that workers of unequal width exchange pages. Ranks with the same
head write the same bytes.

Requests name their pages in ``kv_transfer_params``: ``save_pages`` has one for each page of the
whole blocks of the prompt from ``first_token`` on, and ``load_pages`` the same.

With chunked prefill a prompt takes several engine steps. The blocks that a step fills are saved in
groups of layers, behind the attention of the last layer of a group, and a datagram reports them. So
they travel while the step computes the next layers. A page is written once in each layer, as it may
be read from then on.

On GPUs a save runs while vLLM computes. vLLM holds the blocks of an ended request until its saves
have ended (``finished_sending``). Its response may come earlier, so that it has ``saving_pages``:
the pages are complete when a datagram reports as many in all layers. A failed save is reported as
-1 pages.

When a prompt has ended, aborted or not, a last datagram of each rank reports that it writes no more
into the pages.

A cancelled load may still run when its pages belong to another request. So a file has the
generation of each page, and a load fails unless that is its own when the bytes are copied.
"""

import contextlib
import math
import mmap
import os
import socket
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from baton_copies import copies_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger

_LOG = init_logger(__name__)
_PAGE_TOKENS = 16
_SAVED = struct.Struct("<qqqqq")  # generation of a hand-off, saved pages, layers of all, rank
_ENDED_LAYERS = -1
_GROUP_BYTES = 4 << 20  # of the layers that are reported together


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
    ended: dict[str, int] = field(default_factory=dict)  # generations of ended prompts, by request
    preempted: bool = False  # blocks of unfinished requests were freed


class BatonConnector(KVConnectorBase_V1):
    """Connector of one vLLM: of its scheduler, or of one rank of its tensor parallelism.

    Raises:
        NotImplementedError: vLLM divides its KV in another way, too.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._rank: int = parallel.rank
        self._ranks: int = parallel.tensor_parallel_size
        if parallel.world_size > self._ranks or parallel.decode_context_parallel_size > 1:
            raise NotImplementedError(
                "hand_off: baton copies KV of tensor parallelism, and of no other parallel sizes"
            )
        if parallel.use_ubatching:  # a layer is saved once a step
            raise NotImplementedError("hand_off: baton does not copy KV of microbatches")
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._saving: dict[str, Any] = {}  # requests by id, until their prompt is computed
        self._saved: dict[str, int] = {}  # pages of a prompt that are saved with this step
        self._loads: list[Copy] = []  # for the next step
        self._ended: dict[str, int] = {}  # for the next step: generations of prompts, by request
        self._kind = copies_of(vllm_config.device_config.device_type)
        self._copies: Any = None  # of a worker
        self._generations = torch.empty(0)  # by page
        self._layers: list[str] = []  # names, in order
        self._block_bytes = 0  # of one layer
        self._computed = 0  # layers of the step, in order
        self._begun = 0  # those whose saves have begun
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._saves: dict[str, list[Future[None]]] = {}  # in the background, by request
        self._finished: set[str] = set()  # requests whose blocks are held for these
        self._unreported: dict[str, int] = {}  # ended prompts: their generations, by request
        self._loading: dict[str, Future[None]] = {}
        self._loader = ThreadPoolExecutor(1, "baton-load")
        self._reports_path = ""

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
        preempted = bool(scheduler_output.preempted_req_ids)
        step = Step(loads=self._loads, ended=self._ended, preempted=preempted)
        self._loads = []
        self._ended = {}
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
        wanted = parameters["save_pages"]
        begin = parameters["first_token"] // _PAGE_TOKENS
        first = self._saved.get(name, begin)
        end = min(end_token // self._block_tokens * pages_per_block, begin + len(wanted))
        if end <= first:
            return None
        self._saved[name] = end
        (ids,) = self._kv_cache_manager.get_block_ids(name)
        blocks = ids[first // pages_per_block : end // pages_per_block]
        pages = wanted[first - begin : end - begin]
        return Copy(name, blocks, pages, parameters["generation"], end)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether blocks are held, and what was saved, as a part of the response."""
        if "save_pages" in (request.kv_transfer_params or {}):
            self._ended[request.request_id] = request.kv_transfer_params["generation"]
        unfinished = self._saving.pop(request.request_id, None)
        saved = self._saved.pop(request.request_id, 0)
        in_background = bool(saved) and self._kind.in_background
        parameters = {"saving_pages": saved} if in_background else {}
        if saved and unfinished is None:
            parameters["saved_tokens"] = request.num_prompt_tokens
        return in_background, parameters or None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Map the pool, and write the order of the bytes in a block into the worker's folder.

        Raises:
            NotImplementedError: This vLLM's KV has another shape than this connector copies.
        """
        layers, order = self._kind.layers_and_order(
            kv_caches, self._vllm_config, self._kv_cache_config
        )
        tokens = next(iter(kv_caches.values())).shape[2]
        if tokens != self._block_tokens:
            raise NotImplementedError(
                f"hand_off: baton copies whole blocks of {self._block_tokens} tokens, and vLLM "
                f"divides them into {tokens}: use `--block-size {tokens}`"
            )
        pages = len(layers[0]) * tokens // _PAGE_TOKENS
        heads = layers[0].shape[1]
        all_heads = self._vllm_config.model_config.get_total_num_kv_heads()
        head_bytes = layers[0][0, 0].numel() * _PAGE_TOKENS // tokens // 2
        shape = (len(layers), 2, pages, all_heads, head_bytes)
        size = math.prod(shape)
        extra = self._kv_transfer_config.kv_connector_extra_config
        descriptor = os.open(extra["pool"], os.O_RDWR)
        try:
            os.ftruncate(descriptor, size)
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        pool = torch.frombuffer(mapped, dtype=torch.uint8).view(shape)
        self._layers = list(kv_caches)
        self._block_bytes = layers[0][0].numel()
        first = self._rank * all_heads // self._ranks
        self._copies = self._kind(layers, pool.narrow(3, first, heads))
        path = extra["generations"]
        self._generations = torch.from_file(path, shared=True, size=pages, dtype=torch.long)
        Path(extra["order"]).write_text(order)
        self._reports_path = extra["saves"]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of the step in a thread."""
        for copy in self._step.loads:
            mark = self._copies.mark()
            self._loading[copy.request_id] = self._loader.submit(self._load, copy, mark)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM computes nothing of a request before it is loaded as a whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save the layers up to this one, if they are enough for a group.

        A layer out of order, and those behind it, are saved when the step ends.
        """
        if layer_name not in self._layers[self._computed : self._computed + 1]:
            return
        self._computed += 1
        blocks = sum(len(copy.blocks) for copy in self._step.saves)
        pending_bytes = (self._computed - self._begun) * blocks * self._block_bytes
        if self._computed < len(self._layers) and pending_bytes >= _GROUP_BYTES:
            self._save_layers(self._computed)

    def wait_for_save(self) -> None:
        """Save the other layers of the blocks that this step has filled."""
        self._save_layers(len(self._layers))
        self._computed = 0
        self._begun = 0

    def _save_layers(self, end: int) -> None:
        """Save the layers before ``end``, and report them."""
        layers = slice(self._begun, end)
        self._begun = end
        for copy in self._step.saves:
            ended = partial(self._report, copy, end)
            save = self._copies.save(copy.blocks, copy.pages, layers, ended)
            if save is not None:
                self._saves.setdefault(copy.request_id, []).append(save)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for the saves of blocks that were freed, before the step writes into them."""
        if isinstance(kv_connector_metadata, Step) and kv_connector_metadata.preempted:
            self._copies.wait_for_saves()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the loads that have ended, and finished requests whose saves have."""
        self._report_ended()
        results = KVConnectorTransferResults()
        self._finished |= finished_req_ids & self._saves.keys()
        for name in list(self._finished):
            if all(save.done() for save in self._saves[name]):
                del self._saves[name]
                self._finished.remove(name)
                results.finished_sending.add(name)
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
        """End the threads, and close the socket."""
        self._loader.shutdown()
        if self._copies is not None:
            self._copies.close()
        self._reports.close()

    @property
    def _step(self) -> Step:
        step = self._get_connector_metadata()
        return step if isinstance(step, Step) else Step()

    def _report(self, copy: Copy, layers: int, error: Exception | None) -> None:
        """Report that the first layers of a copy were saved, or why not.

        A report from the background is not lost, as the response depends on it.
        """
        if error is not None:
            _LOG.error("cannot save KV of request %s: %s", copy.request_id, error)
        pages = copy.end if error is None else -1
        flags = 0 if self._kind.in_background else socket.MSG_DONTWAIT
        self._send(copy.generation, pages, layers, flags)

    def _report_ended(self) -> None:
        """Report the ended prompts whose saves have ended, too. No such report is lost."""
        self._unreported |= self._step.ended
        for name, generation in list(self._unreported.items()):
            if all(save.done() for save in self._saves.get(name, ())):
                del self._unreported[name]
                self._send(generation, 0, _ENDED_LAYERS)

    def _send(self, generation: int, pages: int, layers: int, flags: int = 0) -> None:
        report = _SAVED.pack(generation, pages, layers, len(self._layers), self._rank)
        with contextlib.suppress(OSError):  # the response reports what no datagram did
            self._reports.sendto(report, flags, self._reports_path)

    def _load(self, copy: Copy, mark: Any) -> None:
        self._copies.load(copy.blocks, copy.pages, mark)
        if bool((self._generations[copy.pages] != copy.generation).any()):
            raise RuntimeError("its pages were given to another request")
