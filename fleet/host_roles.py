"""`pools: {roles: auto}`: which workers a host starts with, from what was measured on it.

One worker with all cores answers sooner and more than a prefill and a decode worker that share
them, but its streams wait while it reads a prompt. How long they wait is measured once for each
host, model and setting, and kept in ``$BATON_CACHE/roles``.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.model.locate import cache_root, locate
from baton.model.model_config import ModelError
from fleet.pools.resources import engine_settings

MOST_WAIT_S = 0.15  # of a stream for its next token, while a prompt is read beside it
_LIMIT_S = 120.0


class Measured(msgspec.Struct, frozen=True):
    """One worker with all cores of this host; as ``baton.engine.selfcheck.quick`` prints it.

    Attributes:
        decode_s: A step of 8 answers.
        mixed_s: A step that reads a part of a prompt beside them.
        prompt_tokens_per_s: Of these prompts.
    """

    decode_s: float
    mixed_s: float
    prompt_tokens_per_s: float

    @property
    def one_worker(self) -> bool:
        """Whether one worker is the better start; else a prefill and a decode worker."""
        return self.mixed_s <= MOST_WAIT_S

    def __str__(self) -> str:
        which = "one worker with all cores" if self.one_worker else "a prefill and a decode worker"
        return (
            f"{which}: beside a prompt a token takes {self.mixed_s * 1e3:.0f} ms "
            f"(limit {MOST_WAIT_S * 1e3:.0f}), else {self.decode_s * 1e3:.0f} ms"
        )


def settled(config: FleetConfig, measured: Measured | None) -> FleetConfig:
    """The configuration with its numbers of workers; unmeasured it is a pair."""
    if config.pools.roles != "auto":
        return config
    one = measured is not None and measured.one_worker
    sizes = {"roles": "fixed", "prefill": 0 if one else 1, "decode": 1}
    return config.model_copy(update={"pools": config.pools.model_copy(update=sizes)})


def known(config: FleetConfig) -> Measured | None:
    """What was measured on this host with these settings before; reads one small file."""
    with contextlib.suppress(OSError, ModelError, msgspec.DecodeError):
        return msgspec.json.decode(_file(config).read_bytes(), type=Measured)
    return None


def measure(config: FleetConfig) -> Measured:
    """Measure in a process of its own, some 5 s, and keep it.

    Raises:
        RuntimeError: It could not be measured.
    """
    engine = engine_settings(config, "decode")
    command = [sys.executable, "-P", "-m", "baton.engine.selfcheck.quick", config.model]
    command += ["--threads", str(os.cpu_count() or 1), "--dtype", engine.dtype]
    command += ["--numerics", engine.numerics, "--native", engine.native]
    command += ["--weights", engine.weight_quantisation, "--kv", engine.kv_dtype]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=True)
        measured = msgspec.json.decode(done.stdout, type=Measured)
    except (subprocess.SubprocessError, OSError, msgspec.DecodeError) as error:
        raise RuntimeError(f"this host could not be measured: {error}") from error
    with contextlib.suppress(OSError):  # then it is measured again next time
        file = _file(config)
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(measured))
        beside.replace(file)
    return measured


def _file(config: FleetConfig) -> Path:
    """Where it is kept: named by the CPU, its cores, the model's file and what computes."""
    path, _ = locate(config.model)
    about = path.stat()
    engine = engine_settings(config, "decode")
    key = (
        *(_cpu_name(), os.cpu_count(), str(path), about.st_size, about.st_mtime_ns),
        *(engine.dtype, engine.numerics, engine.native),
        *(engine.weight_quantisation, engine.kv_dtype),
    )
    name = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
    return cache_root() / "roles" / f"{name}.json"


def _cpu_name() -> str:
    """As the kernel says it; its flags tell models of one name apart."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    told = (line for line in lines if line.startswith(("model", "cpu family", "flags", "Features")))
    return " ".join(sorted(set(told)))
