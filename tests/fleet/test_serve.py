"""`baton serve MODEL [FLAGS]`: the fleet file that flags of vLLM stand for, and a fleet by them."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from baton.config.fleet_file import DEFAULT_MODEL
from baton.config.load import load_config
from fleet.cli.vllm_flags import FLAGS, INSTEAD, FlagError, keys_of, whole
from tests.fleet.test_up import Served

SERVE = [sys.executable, "-m", "fleet.cli.main", "serve"]


def file_by(folder: Path, *words: str) -> str:
    """Return what `baton serve --dry-run` prints."""
    done = subprocess.run(
        [*SERVE, *words, "--dry-run"], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dry_run_prints_a_fleet_file(tmp_path: Path) -> None:
    words = "ORG/NAME --revision abc --max-model-len=8k --max-num-seqs 16 -tp 2 -q int8 --port 9000"
    words += " --served-model-name small default --lora-modules a=/lora/a --api-key sk-12345678"
    text = file_by(tmp_path, *words.split())
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    config = load_config(file)
    assert (config.model, config.port) == ("hub:ORG/NAME@abc", 9000)
    assert (config.max_context_tokens, config.max_batch_requests) == (8000, 16)
    assert config.model_names == ("small", "default")
    assert (config.pools.start_sizes, config.pools.widest) == ({"prefill": 0, "decode": 1}, 2)
    assert config.quantisation.weights == "int8"
    assert config.adapters.load == {"a": "/lora/a"}
    assert config.api_keys is not None and config.api_keys["sk-12345678"].role == "tenant"


def test_with_vllm_its_own_flags_go_to_it(tmp_path: Path) -> None:
    words = "ORG/NAME --gpu-memory-utilization 0.9 --max-model-len 4096 -tp 2 --enable-lora"
    text = file_by(tmp_path, "--vllm", "/opt/vllm/bin/python", *words.split())
    given = yaml.safe_load(text)
    assert given["max_context_tokens"] == 4096
    args = ["--gpu-memory-utilization", "0.9", "-tp", "2", "--enable-lora"]
    assert given["pools"]["vllm"] == {"python": "/opt/vllm/bin/python", "args": args}


def test_each_flag_sets_its_key() -> None:
    words = {list: ["a", "b"], "--dtype": ["float32"]}
    words |= {"--quantization": ["int4"], "--kv-cache-dtype": ["fp8"], "--lora-modules": ["a=/b"]}
    words["--lora-modules"].append("c=/d")
    for flag in FLAGS:
        name = flag.names.split()[0]
        given = words.get(name, [] if flag.nargs == 0 else ["16"])
        _, keys, rest = keys_of(["m", name, *given], by_vllm=False)
        assert rest == []
        value: object = keys
        for part in filter(None, flag.key.split(".")):
            value = value[part]  # type: ignore[index]
        assert value not in (None, "", keys) or name == "--enable-lora", name
    _, keys, _ = keys_of(["m", "--lora-modules", *words["--lora-modules"]], by_vllm=False)
    assert keys == {"adapters": {"load": {"a": "/b", "c": "/d"}}}
    words = ["m", "--max_model_len=4_0", "--no-enable-lora", "--disable-lora"]
    with pytest.raises(FlagError, match="max-model-len 4_0"):
        keys_of(words, by_vllm=False)
    for name, tokens in {"8K": 8192, "1.5k": 1500, "2m": 2_000_000, "auto": None}.items():
        _, keys, _ = keys_of(["m", "--max-model-len", name], by_vllm=False)
        assert keys.get("max_context_tokens") == tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("m --gpu-memory-utilization=0.9", "--num-gpu-blocks-override"),
        ("m --enable-prefix-caching", "leave it out"),
        ("m --swap-space 4", "no such thing"),
        ("m n", "n: is no flag"),
        ("--port 1 m", "m: is no flag"),
        ("m --dtype float16", "must be one of bfloat16"),
        ("m --max-model-len many", "must be a number"),
        ("m --lora-modules {", "--lora-modules"),
        ("m --lora-modules a", "--lora-modules"),
        ('m --lora-modules {"name":"a","path":"b","is_3d_lora_weight":true}', "is_3d_lora_weight"),
        ('m --lora-modules {"name":"a"}', "--lora-modules"),
        ("m --no-enable-prefix-caching", "cannot switch it off"),
        ("m --no-gpu-memory-utilization", "no such thing"),
        ("m --gpu_memory_utilization 0.9", "--num-gpu-blocks-override"),
        ("m --speculative-config.method ngram", "speculation"),
        ("m --max-num-seqs 1k", "--max-num-seqs"),
        ("m --max-model-len 1.5K", "must be a number"),
        ("m --port", "expected one argument"),
    ],
)
def test_flags_that_are_refused(words: str, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        keys_of(words.split(), by_vllm=False)
    assert not INSTEAD.keys() & {name for flag in FLAGS for name in flag.names.split()}


def test_a_model_is_a_path_or_in_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()
    for word, model in {
        "m.gguf": str(tmp_path / "m.gguf"),
        "/srv/none": "/srv/none",
        "ORG/NAME": "hub:ORG/NAME",
        DEFAULT_MODEL: DEFAULT_MODEL,
    }.items():
        assert keys_of([word], by_vllm=False)[0] == model
        assert keys_of(["--model", word], by_vllm=False)[0] == model
    assert keys_of(["--port", "1"], by_vllm=False)[0] is None
    assert whole({}, None, [])["pools"] == {"prefill": 0, "decode": 1}


@pytest.mark.costly
def test_a_fleet_without_a_file_serves(tmp_path: Path) -> None:
    key = "sk-of-a-team"
    flags = ["--served-model-name", "tiny", "--max-model-len", "512", "--api-key", key]
    served = Served([*SERVE, DEFAULT_MODEL, *flags], tmp_path)
    try:
        url = served.wait_ready(300)
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        models = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).json()["data"]
        assert [(each["id"], each["max_model_len"]) for each in models] == [("tiny", 512)]
        body = {"model": "tiny", "prompt": "The sea is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(
            f"{url}/v1/completions", headers=headers, json=body, timeout=60, trust_env=False
        )
        assert answer.json()["usage"]["completion_tokens"] == 4
    finally:
        served.process.terminate()
        served.process.wait(60)
