"""`roles: auto`: measured once on a host, kept, and decided by how long streams would wait."""

from pathlib import Path

import pytest

from baton.config.fleet_file import FleetConfig
from fleet import host_roles
from fleet.host_roles import MOST_WAIT_S, Measured, known, measure, settled

AUTO = FleetConfig.model_validate({"pools": {"roles": "auto"}})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_roles, "cache_root", lambda: tmp_path)
    return tmp_path


def sizes(config: FleetConfig) -> tuple[int, int]:
    return config.pools.prefill, config.pools.decode


@pytest.mark.parametrize(
    ("mixed_s", "expected"), [(MOST_WAIT_S, (0, 1)), (MOST_WAIT_S + 0.01, (1, 1))]
)
def test_one_worker_where_streams_wait_little(mixed_s: float, expected: tuple[int, int]) -> None:
    config = settled(AUTO, Measured(0.02, mixed_s, 1000.0))
    assert sizes(config) == expected
    assert FleetConfig.model_validate_json(config.to_json()) == config, "as workers read it"


def test_a_host_that_was_not_measured_has_a_pair() -> None:
    assert sizes(settled(AUTO, known(AUTO))) == (1, 1)


def test_numbers_that_were_said_stay() -> None:
    said = FleetConfig.model_validate({"pools": {"prefill": 2, "decode": 3}})
    assert settled(said, Measured(0.02, 0.01, 1000.0)) is said


@pytest.mark.slow  # what a fleet does with it is in `tests/fleet/test_up.py`
def test_it_is_measured_on_the_real_engine_and_kept(cache: Path) -> None:
    measured = measure(AUTO)
    assert 0 < measured.decode_s < measured.mixed_s
    assert measured.prompt_tokens_per_s > 0
    assert known(AUTO) == measured
    assert known(AUTO.model_copy(update={"dtype": "fp32"})) is None, "another engine"
    (file,) = cache.rglob("*.json")
    file.write_bytes(b"{")
    assert known(AUTO) is None


def test_what_cannot_be_measured_says_so() -> None:
    with pytest.raises(RuntimeError, match="cannot measure this host"):
        measure(AUTO.model_copy(update={"model": "/nowhere.gguf"}))
    assert known(AUTO.model_copy(update={"model": "/nowhere.gguf"})) is None
