"""The peer: NVIDIA Dynamo's frontend with its own emulated workers, in a separate environment.

The environment is below ``$BATON_CACHE`` or ``~/.cache/baton``;
``python -m benchmarks.router --build`` creates it.
"""

import json
import os
import shutil
import subprocess
import tempfile
import venv
from pathlib import Path

from rich.console import Console

from baton.folders import cache_root
from baton.model.artifact import resolve_model
from baton.text.tokenizer import load_tokenizer

VERSION = "1.6.1"
_RUNTIME = f"ai-dynamo-runtime=={VERSION}"
_DYNAMO = f"ai-dynamo=={VERSION}"
_BESIDE = (
    *("pyyaml", "numpy", "msgspec", "prometheus_client", "aiohttp", "fastapi", "pyzmq"),
    *("tokenizers", "jinja2", "httpx", "uvloop", "pydantic"),
)


class PeerError(RuntimeError):
    """Dynamo is not installed."""


def cache_folder() -> Path:
    """Return the folder of its environment and its model."""
    return cache_root() / "dynamo"


def build(folder: Path, model: str, console: Console) -> None:
    """Install Dynamo, and write the model in its format."""
    console.print(f"installing {_DYNAMO} in {folder}: about a minute")
    venv.create(folder / "venv", with_pip=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, _RUNTIME, *_BESIDE], check=True)
    subprocess.run([*pip, "--no-deps", _DYNAMO], check=True)
    write_model(folder / "model", model)


def write_model(folder: Path, model: str) -> None:
    """Write a Hugging Face directory without weights: configuration, tokenizer, template."""
    artifact = resolve_model(model)
    config = artifact.config
    tokenizer = load_tokenizer(artifact.tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    end = config.eos_token_ids[0]
    numbers = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_context_tokens,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": end,
        "torch_dtype": "bfloat16",
    }
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": artifact.chat_template,
        "bos_token": tokenizer.token_text(config.bos_token_id or 0),
        "eos_token": tokenizer.token_text(end),
        "model_max_length": config.max_context_tokens,
    }
    (folder / "config.json").write_text(json.dumps(numbers))
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))


class Dynamo:
    """Processes of frontend and workers."""

    def __init__(self, folder: Path, name: str, port: int, workers: int) -> None:
        python = folder / "venv" / "bin" / "python"
        if not python.exists() or not (folder / "model" / "config.json").exists():
            raise PeerError("not built: python -m benchmarks.router --build")
        self.port = port
        self._state = tempfile.mkdtemp(prefix="bench-dynamo-")
        environment = {**os.environ, "DYN_FILE_KV": self._state, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        between = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
        mocker = (
            *("--model-path", str(folder / "model"), "--model-name", name, *between),
            *("--speedup-ratio", "0", "--num-workers", str(workers), "--block-size", "16"),
        )
        frontend = (
            *("--http-port", str(port), "--router-mode", "kv", *between),
            *("--kv-cache-block-size", "16"),
        )
        self._log = Path(self._state) / "log"
        self._processes = []
        for program, arguments in (("mocker", mocker), ("frontend", frontend)):
            with self._log.open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        [str(python), "-m", f"dynamo.{program}", *arguments],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    @property
    def pids(self) -> tuple[int, int]:
        """Process ids of the frontend and of the workers."""
        return self._processes[1].pid, self._processes[0].pid

    def log_end(self) -> str:
        """Return the last lines of both logs."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])

    def close(self) -> None:
        """End frontend and workers."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._state, ignore_errors=True)
