"""`pools: {roles: auto}`: choice between one worker and a pair, by measuring this host.

One worker with all cores has a lower TTFT and a higher throughput than a prefill and a decode
worker that share them, but its streams wait while it computes a prompt. That wait is measured once
for each host, model and setting, and kept in ``$BATON_CACHE/roles``.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.control_groups import usable_cpus
from baton.folders import cache_root
from baton.model.locate import locate
from baton.model.model_config import ModelError
from fleet.pools.resources import engine_settings

MOST_WAIT_S = 0.15  # for a stream's next token while a prompt is computed
_LIMIT_S = 120.0


class Measured(msgspec.Struct, frozen=True):
    """Figures of one worker with all cores, as ``baton.engine.selfcheck.quick`` prints them.

    Attributes:
        decode_s: Duration of a step of 8 decoding requests.
        mixed_s: Duration of a step that also computes a part of a prompt.
        prompt_tokens_per_s: Rate at which the prompt is computed.
    """

    decode_s: float
    mixed_s: float
    prompt_tokens_per_s: float

    @property
    def one_worker(self) -> bool:
        """Return whether one worker is better than a prefill and a decode worker."""
        return self.mixed_s <= MOST_WAIT_S

    def __str__(self) -> str:
        which = "one worker with all cores" if self.one_worker else "a prefill and a decode worker"
        return (
            f"{which}: a token takes {self.mixed_s * 1e3:.0f} ms while a prompt is computed "
            f"(limit {MOST_WAIT_S * 1e3:.0f} ms), else {self.decode_s * 1e3:.0f} ms"
        )


def settled(config: FleetConfig, measured: Measured | None) -> FleetConfig:
    """Return the configuration with fixed pool sizes: a pair if nothing was measured."""
    if config.pools.roles != "auto":
        return config
    one = measured is not None and measured.one_worker
    sizes = {"roles": "fixed", "prefill": 0 if one else 1, "decode": 1}
    return config.model_copy(update={"pools": config.pools.model_copy(update=sizes)})


def known(config: FleetConfig) -> Measured | None:
    """Return the stored figures of this host with these settings, if there are any."""
    with contextlib.suppress(OSError, ModelError, msgspec.DecodeError):
        return msgspec.json.decode(_file(config).read_bytes(), type=Measured)
    return None


def measure(config: FleetConfig) -> Measured:
    """Measure this host in a child process, which takes about 5 s, and store the figures."""
    engine = engine_settings(config, "decode")
    command = [sys.executable, "-P", "-m", "baton.engine.selfcheck.quick", config.model]
    command += ["--threads", str(usable_cpus()), "--dtype", engine.dtype]
    command += ["--numerics", engine.numerics, "--native", engine.native]
    command += ["--weights", engine.weight_quantisation, "--kv", engine.kv_dtype]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=True)
        measured = msgspec.json.decode(done.stdout, type=Measured)
    except (subprocess.SubprocessError, OSError, msgspec.DecodeError) as error:
        raise RuntimeError(f"cannot measure this host: {error}") from error
    with contextlib.suppress(OSError):  # then the next start measures again
        file = _file(config)
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(measured))
        beside.replace(file)
    return measured


def _file(config: FleetConfig) -> Path:
    path, _ = locate(config.model)
    about = path.stat()
    engine = engine_settings(config, "decode")
    key = (
        *(_cpu_name(), usable_cpus(), str(path), about.st_size, about.st_mtime_ns),
        *(engine.dtype, engine.numerics, engine.native),
        *(engine.weight_quantisation, engine.kv_dtype),
    )
    name = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
    return cache_root() / "roles" / f"{name}.json"


def _cpu_name() -> str:
    """Return the kernel's description; its flags tell apart models that share a name."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    keys = ("model", "cpu family", "flags", "Features")
    return " ".join(sorted({line for line in lines if line.startswith(keys)}))
