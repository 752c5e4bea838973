"""`baton up` and `baton config check` name what this machine lacks before anything starts."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from baton.config.clients import ClientLimitsConfig
from baton.config.fleet_file import FleetConfig, PoolsConfig
from baton.config.network import HttpsConfig
from baton.control_groups import total_memory_bytes, usable_cpus
from fleet.cli.main import app
from fleet.local.checks.machine_fit import missing_files, missing_resources

CORES = usable_cpus()
PAIR = PoolsConfig(prefill=1, decode=1)


def test_the_default_fleet_lacks_nothing() -> None:
    assert missing_files(FleetConfig()) == []
    assert missing_resources(FleetConfig()) == []


def test_a_range_with_fewer_ports_than_the_workers_need_is_told() -> None:
    def told(ports: str) -> list[str]:
        return missing_resources(FleetConfig(pools=PoolsConfig(prefill=2, decode=1, ports=ports)))

    assert told("12000-12005") == []
    assert told("12000-12004") == [
        "pools.ports: 12000-12004 has 5 ports, but 3 workers need 6 (9 with KV by TCP)"
    ]


def test_pools_larger_than_the_memory_are_told_with_both_sizes() -> None:
    assert missing_resources(FleetConfig(pools=PAIR, kv_blocks_per_worker=1024)) == []
    [line] = missing_resources(FleetConfig(pools=PAIR, kv_blocks_per_worker=10_000_000))
    assert line.startswith("kv_blocks_per_worker: 10000000 blocks of 2 workers need 6866.5 GiB")
    assert f"{total_memory_bytes() / 2**30:.1f} GiB" in line


def test_a_rank_with_more_cpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = missing_resources(FleetConfig(cpus_per_rank=CORES + 6.0))
    assert line == f"cpus_per_rank: {CORES + 6}, but this machine has {CORES} CPUs"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_DEVICE", "cuda")
    [line] = missing_resources(FleetConfig())
    assert "no CUDA device" in line


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("")
    https = HttpsConfig(certificate=str(tmp_path / "cert.pem"), key=str(tmp_path / "no.pem"))
    config = FleetConfig(clients=ClientLimitsConfig(tls=https))
    assert missing_files(config) == [
        f"clients.tls.key: cannot read {tmp_path / 'no.pem'}: No such file or directory"
    ]


def test_the_check_and_the_start_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: f\nport: 0\ncpus_per_rank: 500\n")
    told = f"cpus_per_rank: 500, but this machine has {CORES} CPUs"
    checked = CliRunner().invoke(app, ["config", "check", str(file)])
    assert checked.exit_code == 0, "the file may be meant for another machine"
    assert f"not on this machine: {told}" in checked.output
    started = CliRunner().invoke(app, ["up", str(file)])
    assert started.exit_code == 1
    assert told in " ".join(started.output.split())
