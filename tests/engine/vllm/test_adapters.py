"""LoRA adapters of a vLLM worker, beside sockets that repeat what a real vLLM sent."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.model.artifact import ModelArtifact
from baton.model.lora_artifact import read_adapter
from baton.types import events as ev
from baton.types.params import AdapterRef, SamplingParams
from baton.wire.tokens import pack_tokens
from tests.engine.lora_files import write_adapter
from tests.engine.vllm.record import FRANCE, SEEDS
from tests.engine.vllm.test_engine import (
    EOS,
    RECORDED,
    VOCABULARY,
    Replay,
    Running,
    sending,
    translating,
)

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


@pytest.fixture
async def running(tmp_path: Path, artifact: ModelArtifact) -> AsyncIterator[Running]:
    config = dataclasses.replace(artifact.config, eos_token_ids=EOS, vocab_size=VOCABULARY)
    async with translating(Replay(tmp_path), config=config, max_adapters=1) as running:
        running.replay.reply = sending((RECORDED / "length.sse").read_bytes())
        yield running


@pytest.fixture
def make(tmp_path: Path, artifact: ModelArtifact) -> Any:
    """Write an adapter, and return its reference."""

    def made(name: str, seed: int = 0) -> AdapterRef:
        config = artifact.config
        folder = write_adapter(tmp_path / name, config, seed=seed, layers=(0,), targets=("q_proj",))
        return AdapterRef(name, read_adapter(folder, config, 64).digest.hex(), str(folder))

    return made


def submit(running: Running, ref: AdapterRef, request_id: str = "r") -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=SEEDS[0], adapter=ref)
    prompt = pack_tokens(FRANCE)
    running.engine.handle(
        messages.Submit(request_id=request_id, prompt_token_ids=prompt, spec=spec)
    )


async def test_an_adapter_is_loaded_once_and_named_in_each_request(running, make) -> None:
    ref = make("french")
    name = f"adapter-{ref.digest}"
    submit(running, ref)
    assert (await running.end()).error_code == ""
    changes = running.of(ev.AdapterChanged)
    running.reports.clear()
    submit(running, ref, "s")
    assert (await running.end()).error_code == ""
    assert running.replay.adapter_calls == [(LOAD, {"lora_name": name, "lora_path": ref.path})]
    assert [body["model"] for body in running.replay.bodies] == [name, name]
    (change,) = changes
    assert (change.name, change.digest, change.what, change.held) == (
        *("french", ref.digest, "loaded", 1),
    )


async def test_an_idle_adapter_makes_room_for_another(running, make) -> None:
    first, second = make("first"), make("second", seed=1)
    submit(running, first)
    await running.end()
    changes = running.of(ev.AdapterChanged)
    running.reports.clear()
    submit(running, second, "s")
    assert (await running.end()).error_code == ""
    calls = [(target, body["lora_name"]) for target, body in running.replay.adapter_calls]
    assert calls == [
        (LOAD, f"adapter-{first.digest}"),
        (UNLOAD, f"adapter-{first.digest}"),
        (LOAD, f"adapter-{second.digest}"),
    ]
    changes += running.of(ev.AdapterChanged)
    assert [one.what for one in changes] == ["loaded", "evicted", "loaded"]


async def test_files_that_have_changed_are_not_loaded(running, make) -> None:
    ref = make("french")
    make("french", seed=1)
    submit(running, ref)
    ended = await running.end()
    assert ended.error_code == "adapter_load_failed"
    assert "has changed since it was loaded" in ended.error_message
    assert running.replay.adapter_calls == []


async def test_what_vllm_does_not_load_fails_its_requests_only(running, make) -> None:
    running.replay.adapter_status = b"400 Bad Request"
    submit(running, make("french"))
    ended = await running.end()
    assert ended.error_code == "adapter_load_failed"
    assert "status 400: told" in ended.error_message
    running.reports.clear()
    running.submit(FRANCE)
    assert (await running.end()).error_code == ""
    assert "model" not in running.replay.bodies[-1]


async def test_a_request_that_waits_for_its_adapter_is_cancelled(running, make) -> None:
    submit(running, make("french"))
    running.engine.handle(messages.Cancel("r"))
    assert (await running.end()).error_code == "cancelled"
    assert running.replay.bodies == []


async def test_without_the_argument_of_vllm_adapters_are_refused(tmp_path, make) -> None:
    async with translating(Replay(tmp_path)) as running:
        submit(running, make("french"))
        ended = await running.end()
        assert ended.error_code == "invalid_request"
        assert "--enable-lora" in ended.error_message
