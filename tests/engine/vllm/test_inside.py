"""Modules that vLLM imports in its own interpreter, with packages in place of vLLM and NIXL."""

import asyncio
import importlib
import logging
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import baton.engine.vllm.inside
from baton.engine.remote.live_request import Saved
from baton.engine.vllm.hand_off_baton import SaveReports

FOLDER = Path(baton.engine.vllm.inside.__file__).parent


class SpinCondition:
    """Stand-in for vLLM's, which has read a message at ``last_read``."""

    busy_loop_s = 1.0

    def __init__(self, sockets: list[object]) -> None:
        self.last_read = time.monotonic()
        self.local_notify_socket = self
        self.limits: list[object] = []  # of waits
        self.received = 0
        self.poller = self
        self._sockets = sockets

    def wait(self, timeout_ms: int | None = None) -> None:
        self.limits.append(("idle", timeout_ms))

    def poll(self, timeout: int) -> list[tuple[object, int]]:
        self.limits.append(timeout)
        return [(self, 1) for _ in self._sockets]

    def recv(self, flags: int) -> None:
        self.received += 1


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put vLLM's module of waits and its platform, a CPU, in place."""
    monkeypatch.setitem(sys.modules, "zmq", SimpleNamespace(NOBLOCK=1))
    broadcast = ModuleType("shm_broadcast")
    broadcast.SpinCondition = type("SpinCondition", (SpinCondition,), {})
    package = "vllm.distributed.device_communicators"
    stand_in(monkeypatch, package, shm_broadcast=broadcast)
    platform = SimpleNamespace(is_cpu=lambda: True)
    stand_in(monkeypatch, "vllm.platforms", current_platform=platform)
    return broadcast


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Baton's module around NixlConnector beside stand-ins for NIXL and vLLM."""

    class Connector:
        def __init__(self) -> None:
            self.started: list[Any] = []

        def start_load_kv(self, forward_context: Any) -> None:
            self.started.append(forward_context)

    bindings = SimpleNamespace(nixlAgentConfig=type("nixlAgentConfig", (), {}))
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_bindings=bindings))
    package = "vllm.distributed.kv_transfer.kv_connector.v1"
    stand_in(monkeypatch, package, nixl=SimpleNamespace(NixlConnector=Connector))
    return inside(monkeypatch, "baton_nixl")


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Put a module in place of one of vLLM's."""
    for number in range(1, name.count(".") + 1):
        monkeypatch.setitem(sys.modules, name.rsplit(".", number)[0], ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))


def inside(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Import a module as vLLM does."""
    forget(monkeypatch, name)
    return importlib.import_module(name)


def forget(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a module of Baton's be imported as vLLM does, and forget it after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules[name]


def test_waits_soon_after_a_message_sleep(waits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads the plugin in each of its processes."""
    forget(monkeypatch, "baton_waits")
    (plugin,) = metadata.entry_points(group="vllm.general_plugins", name="baton_waits")
    plugin.load()()
    quiet = waits.SpinCondition([])
    quiet.wait(5000)
    assert (quiet.limits, quiet.received) == ([1], 0)
    notified = waits.SpinCondition(["a notification"])
    notified.wait(5000)
    assert (notified.limits, notified.received) == ([1], 1)
    idle = waits.SpinCondition([])
    idle.last_read -= 2.0
    idle.wait(5000)
    assert idle.limits == [("idle", 5000)]


def test_waits_on_gpus_stay_those_of_vllm(waits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False)
    stand_in(monkeypatch, "vllm.platforms", current_platform=platform)
    inside(monkeypatch, "baton_waits").install()
    assert waits.SpinCondition.wait is SpinCondition.wait


def test_the_progress_thread_of_nixl_gets_a_delay(nixl: Any) -> None:
    config = nixl._bindings.nixlAgentConfig()  # as NIXL's Python API sets it
    config.useProgThread = True
    config.pthrDelay = 0
    assert config.useProgThread
    assert config.pthrDelay == 1_000


def test_steps_that_compute_nothing_sleep(nixl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(nixl.time, "sleep", slept.append)
    connector = nixl.NixlConnector()
    connector.start_load_kv(SimpleNamespace(attn_metadata={}))
    assert slept == []
    connector.start_load_kv(SimpleNamespace(attn_metadata=None))
    assert slept == [0.001]
    assert len(connector.started) == 2


@pytest.mark.parametrize("is_cpu", [False, True])
def test_generators_of_cpus_can_be_rewound(monkeypatch: pytest.MonkeyPatch, is_cpu: bool) -> None:
    monkeypatch.setattr(torch, "Generator", torch.Generator)
    platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    stand_in(monkeypatch, "vllm.platforms", current_platform=platform)
    add_adapters(monkeypatch)
    inside(monkeypatch, "baton_worker")
    generator = torch.Generator("cpu")
    generator.manual_seed(5)
    first = torch.rand(3, generator=generator)
    if not is_cpu:
        assert type(generator) is torch._C.Generator
        return
    generator.set_offset(generator.get_offset() - 4)  # as vLLM does
    assert torch.equal(torch.rand(3, generator=generator), first)
    assert not torch.equal(torch.rand(3, generator=generator), first)


def add_adapters(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put operations of adapters in place which take the last one for index -1, as vLLM's do."""

    def bgmv_expand(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor
    ) -> None:
        output += torch.einsum("bi, boi -> bo", inputs, weights[indices])

    operations = SimpleNamespace(bgmv_expand=bgmv_expand, bgmv_expand_slice=bgmv_expand)
    wrapper = SimpleNamespace(bgmv_expand=bgmv_expand, bgmv_expand_slice=bgmv_expand)
    stand_in(monkeypatch, "vllm.lora.ops.torch_ops", lora_ops=operations)
    stand_in(monkeypatch, "vllm.lora.punica_wrapper", punica_cpu=wrapper)
    return operations


def test_tokens_without_an_adapter_are_not_changed_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: True)
    monkeypatch.setattr(torch, "Generator", torch.Generator)
    stand_in(monkeypatch, "vllm.platforms", current_platform=platform)
    operations = add_adapters(monkeypatch)
    inside(monkeypatch, "baton_worker")
    inputs, weights = torch.full((3, 2), 2.0), torch.ones((2, 4, 2))
    for name in ("bgmv_expand", "bgmv_expand_slice"):
        output = torch.zeros((3, 4))
        getattr(operations, name)(inputs, weights, output, torch.tensor([-1, 0, 1]))
        assert output.sum(dim=1).tolist() == [0.0, 16.0, 16.0]


class SamplingArguments:
    """Stand-in for vLLM's SamplingParams, whose bad words are texts."""

    def __init__(self, **extra: object) -> None:
        self.extra_args = extra or None
        self._bad_words_token_ids: object = None

    def update_from_tokenizer(self, tokenizer: object) -> None:
        self.tokenizer = tokenizer


class Grammar:
    """Stand-in for vLLM's, which takes the tokens 1, 2, 3 in this order."""

    def __init__(self) -> None:
        self.taken = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.taken += len(tokens)
        return tokens == [1, 2, 3][: len(tokens)]


def test_vllm_takes_tokens_as_bad_words_and_begins_formats_behind_emitted_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = type("SamplingParams", (SamplingArguments,), {})
    manager = type("Manager", (), {"_create_grammar": lambda self, request: Grammar()})
    stand_in(monkeypatch, "vllm.v1.structured_output", StructuredOutputManager=manager)
    stand_in(monkeypatch, "vllm.sampling_params", SamplingParams=arguments)
    forget(monkeypatch, "baton_sampling")
    (plugin,) = metadata.entry_points(group="vllm.general_plugins", name="baton_sampling")
    plugin.load()()

    def taken(**extra: object) -> int:
        request = SimpleNamespace(sampling_params=arguments(**extra), request_id="r")
        return manager()._create_grammar(request).taken

    assert (taken(), taken(baton_emitted=[1, 2])) == (0, 2)
    with pytest.raises(ValueError, match="do not match the format"):
        taken(baton_emitted=[2])
    words = arguments(baton_bad_words=[[5, 6]])
    words.update_from_tokenizer("tokenizer")
    assert (words.tokenizer, words._bad_words_token_ids) == ("tokenizer", [[5, 6]])
    plain = arguments()
    plain.update_from_tokenizer("tokenizer")
    assert plain._bad_words_token_ids is None


def connectors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Baton's module of the connector beside stand-ins for vLLM."""

    class Base:
        def __init__(self, vllm_config: Any, role: object, kv_cache_config: object) -> None:
            self.metadata: object = None
            self._vllm_config = vllm_config
            self._kv_cache_config = kv_cache_config
            self._kv_transfer_config = vllm_config.kv_transfer_config

        def _get_connector_metadata(self) -> object:
            return self.metadata

    stand_in(monkeypatch, "vllm.logger", init_logger=logging.getLogger)
    stand_in(
        monkeypatch,
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        KVConnectorBase_V1=Base,
        KVConnectorMetadata=object,
        KVConnectorTransferResults=TransferResults,
    )
    copies(monkeypatch)
    return inside(monkeypatch, "baton_kv")


def vllm_config(
    device_type: str, folder: Path, rank: int = 0, ranks: int = 1, heads: int = 2, **parallel: int
) -> Any:
    """Return the configuration of a rank of vLLM whose blocks have 32 tokens.

    ``heads`` are the KV heads of all ranks.
    """
    files = {name: str(folder / name) for name in ("pool", "generations", "order", "saves")}
    own = {"world_size": ranks, "decode_context_parallel_size": 1}
    own |= {"use_ubatching": False, **parallel}
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32, cache_dtype="auto"),
        device_config=SimpleNamespace(device_type=device_type),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=files),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks, **own),
    )


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return Baton's connector beside stand-ins for vLLM."""
    one = connectors(monkeypatch).BatonConnector(vllm_config("cpu", tmp_path), None, None)
    one._kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: ([50, 51, 52, 53],))
    one._reports_path = str(tmp_path / "saves")
    one._copies = one._kind([], torch.empty(0))
    return one


def note(reported: list[tuple[int, int, int]]) -> Callable[[int, Saved, int], None]:
    """Return a callback that notes generation, complete pages and rank."""
    return lambda generation, saved, rank: reported.append((generation, saved.pages, rank))


class TransferResults:
    """Stand-in for vLLM's."""

    def __init__(self) -> None:
        self.finished_sending: set[str] = set()
        self.finished_recving: set[str] = set()
        self.failed_recving: set[str] = set()


def copies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Baton's module of copies beside stand-ins for vLLM's order of bytes and backends."""
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    stand_in(
        monkeypatch,
        "vllm.distributed.kv_transfer.kv_connector.utils",
        get_current_attn_backends=lambda config, names: [backend],
    )
    stand_in(
        monkeypatch,
        "vllm.v1.attention.backends.cpu_attn",
        _get_attn_isa=lambda dtype, tokens, head_dim, kind: "amx",
    )
    return inside(monkeypatch, "baton_copies")


def engine_step(name: str, computed: int, scheduled: int) -> SimpleNamespace:
    """Return a step of vLLM's scheduler that computes tokens of one running request."""
    return SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=[name], num_computed_tokens=[computed]),
        scheduled_new_reqs=[],
        num_scheduled_tokens={name: scheduled},
        preempted_req_ids=None,
    )


async def test_each_step_saves_the_blocks_that_it_fills_once(
    connector: Any, tmp_path: Path
) -> None:
    reported: list[tuple[int, int, int]] = []
    ended: list[tuple[int, int]] = []
    saves = SaveReports(str(tmp_path / "saves"), note(reported), lambda *end: ended.append(end))
    parameters = {"save_pages": [*range(10, 16)], "first_token": 0, "generation": 7}
    request = SimpleNamespace(request_id="r", kv_transfer_params=parameters, num_prompt_tokens=100)
    connector.update_state_after_alloc(request, None, 0)
    copies = []
    # 40 of 100 tokens, then a preemption: all is computed again
    for computed, scheduled in ((0, 40), (0, 30), (30, 40), (70, 30)):
        connector.metadata = connector.build_connector_meta(engine_step("r", computed, scheduled))
        copies += [(copy.blocks, copy.pages) for copy in connector.metadata.saves]
        connector.wait_for_save()
    assert copies == [([50], [10, 11]), ([51], [12, 13]), ([52], [14, 15])]
    await asyncio.sleep(0.05)
    assert reported == [(7, 2, 0), (7, 4, 0), (7, 6, 0)]
    assert connector.request_finished(request, []) == (False, {"saved_tokens": 100})
    connector.metadata = connector.build_connector_meta(engine_step("other", 0, 1))
    assert ended == []
    for _ in range(2):
        connector.get_transfer_results({"r"})
        connector.metadata = connector.build_connector_meta(engine_step("other", 1, 1))
    await asyncio.sleep(0.05)
    assert ended == [(7, 0)]
    assert len(reported) == 3
    saves.close()
    connector.shutdown()


def test_saves_begin_at_the_first_block_that_the_decode_worker_lacks(connector: Any) -> None:
    parameters = {"save_pages": [*range(10, 14)], "first_token": 32, "generation": 7}
    request = SimpleNamespace(request_id="r", kv_transfer_params=parameters, num_prompt_tokens=100)
    connector.update_state_after_alloc(request, None, 0)
    copies = []
    for computed, scheduled in ((0, 32), (32, 40), (72, 28)):
        step = connector.build_connector_meta(engine_step("r", computed, scheduled))
        copies += [(copy.blocks, copy.pages, copy.end) for copy in step.saves]
    assert copies == [([51], [10, 11], 4), ([52], [12, 13], 6)]
    assert connector.request_finished(request, []) == (False, {"saved_tokens": 100})
    connector.shutdown()


async def test_a_prompt_that_ends_before_it_is_computed_was_not_saved(
    connector: Any,
) -> None:
    parameters = {"save_pages": [*range(10, 16)], "first_token": 0, "generation": 7}
    request = SimpleNamespace(request_id="r", kv_transfer_params=parameters, num_prompt_tokens=100)
    connector.update_state_after_alloc(request, None, 0)
    (copy,) = connector.build_connector_meta(engine_step("r", 0, 64)).saves
    assert (copy.pages, copy.end) == ([10, 11, 12, 13], 4)
    assert connector.request_finished(request, []) == (False, None)
    step = connector.build_connector_meta(engine_step("r", 64, 36))
    assert (step.saves, step.ended) == ([], {"r": 7})
    connector.shutdown()
