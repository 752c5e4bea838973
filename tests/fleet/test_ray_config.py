"""`baton config import`: files that Ray's own `LLMConfig` accepts become fleet files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from baton.config.load import load_config
from fleet.cli.ray_config import config_import

SMALL = {
    "model_loading_config": {"model_id": "qwen-0.5b", "model_source": "Qwen/Qwen2.5-0.5B-Instruct"},
    "llm_engine": "vLLM",
    "accelerator_type": "A10G",
    "deployment_config": {"num_replicas": 2, "max_ongoing_requests": 64},
    "engine_kwargs": {
        "max_model_len": 8192,
        "max_num_seqs": 16,
        "tensor_parallel_size": 2,
        "enable_chunked_prefill": True,
        "gpu_memory_utilization": 0.9,
        "kv_transfer_config": {"kv_connector": "NixlConnector"},
        "revision": None,
    },
    "lora_config": {
        "dynamic_lora_loading_path": "s3://bucket/lora",
        "max_num_adapters_per_replica": 4,
    },
    "experimental_configs": {"stream_batching_interval_ms": 0},
}
LARGE = {
    "model_loading_config": {"model_id": "org/large"},
    "engine_kwargs": {"max_model_len": 4096, "max_num_seqs": 8},
}


JUDGE = """
import json, sys
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
for config in json.load(sys.stdin):
    LLMConfig.model_validate(config)
print(json.dumps(list(LLMConfig.model_fields)))
"""


@pytest.fixture(scope="module")
def fields_of_ray() -> set[str]:
    """Fields of Ray's `LLMConfig`, which accepts the examples here.

    Its import takes seconds and sets up logging, so it has a process of its own.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", JUDGE],
        input=json.dumps([SMALL, LARGE]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def imported(folder: Path, loaded: Any, capsys: Any, vllm: str | None = None) -> tuple[Any, str]:
    """Return the configuration and the text that the command prints for a file."""
    file = folder / "ray.yaml"
    file.write_text(yaml.safe_dump(loaded, sort_keys=False))
    config_import(file, vllm)
    text = capsys.readouterr().out
    made = folder / "fleet.yaml"
    made.write_text(text)
    return load_config(made), text


def left_out(text: str) -> set[str]:
    """Return the keys that a text says it leaves out."""
    lines = [line.split(": ") for line in text.splitlines() if line.startswith("# left out: ")]
    return {parts[2] for parts in lines}


def test_an_llm_config_becomes_a_fleet_file(tmp_path: Path, capsys: Any) -> None:
    config, text = imported(tmp_path, SMALL, capsys)
    assert config.model == "hub:Qwen/Qwen2.5-0.5B-Instruct"
    assert config.model_names == ("qwen-0.5b",)
    assert (config.max_context_tokens, config.max_batch_requests) == (8192, 16)
    assert (config.pools.start_sizes, config.pools.widest) == ({"prefill": 0, "decode": 2}, 2)
    assert config.adapters.max_loaded == 4
    used = {"accelerator_type", "experimental_configs", "lora_config.dynamic_lora_loading_path"}
    used |= {"deployment_config.max_ongoing_requests"}
    words = ("enable_chunked_prefill", "gpu_memory_utilization", "kv_transfer_config")
    assert left_out(text) == used | {f"engine_kwargs.{word}" for word in words}


@pytest.mark.costly
def test_every_field_of_ray_is_used_or_named(
    tmp_path: Path, capsys: Any, fields_of_ray: set[str]
) -> None:
    """The judge is the installed Ray, which also accepts the examples of the other tests."""
    used = {"model_loading_config", "engine_kwargs", "deployment_config", "lora_config"}
    others = fields_of_ray - used
    assert len(others) >= 7
    whole = LARGE | dict.fromkeys(others, "x")
    assert left_out(imported(tmp_path, whole, capsys)[1]) == others


def test_with_vllm_its_arguments_go_to_it(tmp_path: Path, capsys: Any) -> None:
    config, text = imported(tmp_path, SMALL, capsys, vllm="/opt/vllm/bin/python")
    assert config.pools.vllm is not None and config.pools.decode == 2
    flags = ("--tensor-parallel-size 2", "--enable-chunked-prefill", "--gpu-memory-utilization 0.9")
    assert " ".join(config.pools.vllm.args) == " ".join(flags)
    assert "engine_kwargs.kv_transfer_config" in left_out(text)


def test_a_serve_config_may_have_several_models(tmp_path: Path, capsys: Any) -> None:
    serve = {
        "applications": [
            {
                "name": "llm",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {"llm_configs": [SMALL, LARGE]},
            }
        ]
    }
    config, text = imported(tmp_path, serve, capsys)
    assert [lane.model for lane in config.lanes] == [
        "hub:Qwen/Qwen2.5-0.5B-Instruct",
        "hub:org/large",
    ]
    assert [lane.max_context_tokens for lane in config.lanes] == [8192, 4096]
    assert config.max_batch_requests == 16
    assert "max_batch_requests" in left_out(text)


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        ("text", "no LLMConfig"),
        ({"model": "m"}, "model_id"),
        ({"applications": [{"args": {"llm_configs": ["a.yaml"]}}]}, "no LLMConfig"),
        ({"model_loading_config": {"model_id": "m", "model_source": "s3://b/m"}}, "download"),
        (LARGE | {"engine_kwargs": {"max_num_seqs": 0}}, "max_batch_requests"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, capsys: Any, loaded: Any, message: str) -> None:
    file = tmp_path / "ray.yaml"
    file.write_text(yaml.safe_dump(loaded))
    with pytest.raises(typer.Exit):
        config_import(file)
    assert message in capsys.readouterr().err.replace("\n", " ")
