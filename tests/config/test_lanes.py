"""`models:` of the fleet file: what a model takes from the fleet, and what is refused."""

import re
from pathlib import Path

import pytest

from baton.config.fleet_file import FleetConfig
from baton.config.load import ConfigError, load_config
from baton.types.lanes import split_version
from router.settings import LaneSettings, ProcessSettings

FILE = """
fleet: two
models:
  small:
    model: package:x/small.gguf
    pools: {prefill: 1}
  large.v1:
    model: large.gguf
    max_context_tokens: 64
    kv_blocks_per_worker: 32
    slo: {ttft_s: 1, itl_s: 0.2}
    pools: {auto: {min: 0, max: 8}}
pools: {prefill: 3, decode: 2, engine: emulated}
kv_blocks_per_worker: 16
max_context_tokens: 128
api_keys: {a-long-key: team}
"""


def read(folder: Path, text: str = FILE) -> FleetConfig:
    file = folder / "fleet.yaml"
    file.write_text(text)
    return load_config(file)


def test_keys_that_a_model_leaves_out_are_the_fleets(tmp_path: Path) -> None:
    config = read(tmp_path)
    small, large = config.lanes
    assert (small.fleet, small.model_names) == ("two.small", ("small",))
    assert (large.fleet, large.model_names) == ("two.large-v1", ("large.v1",))
    assert small.pools.start_sizes == {"prefill": 1, "decode": 2}
    assert large.pools.start_sizes == {"prefill": 3, "decode": 2}
    assert (small.max_context_tokens, large.max_context_tokens) == (128, 64)
    assert (small.kv_blocks_per_worker, large.kv_blocks_per_worker) == (16, 32)
    assert small.slo is None
    assert large.slo is not None
    assert large.slo.ttft_s == 1
    assert {lane.pools.engine.emulated for lane in config.lanes} == {"epyc-135m"}
    assert large.model == str(tmp_path / "large.gguf")
    assert config.cpus_total == 3 + 8


def test_a_process_of_one_lane_reads_the_same_configuration(tmp_path: Path) -> None:
    config = read(tmp_path)
    for name, lane in zip(config.models, config.lanes, strict=True):
        received = FleetConfig.model_validate_json(config.only(name).to_json())
        assert received.lanes == (lane.model_copy(update={"api_keys": None}),)


def test_a_router_has_settings_of_its_process_and_of_each_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_STATE_DIR", "/state")
    (tmp_path / "golden.jsonl").write_text('{"name": "hi", "prompt": "hi", "tokens": [1]}\n')
    config = read(
        tmp_path, FILE.replace("kv_blocks_per_worker: 32", "gates: {golden: golden.jsonl}")
    )
    process = ProcessSettings.of(config, port=1)
    small, large = LaneSettings.of_lanes(config)
    assert (process.fleet, process.port) == ("two", 1)
    folders = [process.lane_dir(lane.fleet) for lane in (small, large)]
    assert folders == [Path("/state/lanes/small"), Path("/state/lanes/large-v1")]
    assert (small.other_models, large.other_models) == (("large.v1",), ("small",))
    assert (small.starts_from_zero, large.starts_from_zero) == (False, True)
    assert (small.slo, large.slo) == (None, config.lanes[1].slo)
    assert (len(small.golden), len(large.golden)) == (0, 1)
    assert {lane.window_requests for lane in (small, large)} == {config.max_batch_requests}


def test_a_fleet_with_one_model_is_its_only_lane() -> None:
    config = FleetConfig()
    assert config.lanes == (config,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{model: x, models: {a: {model: x}}}", "`model` and `models` exclude each other"),
        (
            "{models: {a.b: {model: x}, a-b: {model: x}}}",
            "names must differ in more than '.', '_', '-' and '@'",
        ),
        (
            "{models: {a: {model: x, pools: {routers: 2}}}}",
            "models.a: pools.routers holds for all models: set it in `pools` itself",
        ),
        (
            "{models: {a: {model: x, pools: {roles: auto}}}}",
            "`roles` is not supported: set `prefill` and `decode`",
        ),
        ("{models: {a: {modl: x}}}", "models.a.modl: unknown key; did you mean `model`?"),
        ("{models: {a: {pools: {}}}}", "models.a = {'pools': {}}: the key `model` is missing"),
        (
            "{models: {a: {model: x, pools: {prefill: 0, decode: 0}}}}",
            "models.a.pools: needs at least one worker in prefill or decode",
        ),
        (
            "{models: {a: {model: x, pools: {auto: {min: 1, max: 3}}}}}",
            "models.a: pools.auto needs `slo:",
        ),
        (
            "{models: {a: {model: x, adapters: {load: {a: /x}}}}}",
            "adapters.load: 'a' is already a name of the model",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read(tmp_path, text)


def test_a_version_is_a_model_of_its_own(tmp_path: Path) -> None:
    config = read(tmp_path, FILE.replace("large.v1:", "small@2:"))
    assert [lane.fleet for lane in config.lanes] == ["two.small", "two.small-2"]
    assert config.lanes[1].model_names == ("small@2",)
    for name in ("small@", "small@0", "small@x", "@2", "small@2@3"):
        with pytest.raises(ConfigError):
            read(tmp_path, FILE.replace("large.v1:", f"'{name}':"))
    with pytest.raises(ConfigError, match="names must differ in more than"):
        read(tmp_path, FILE.replace("large.v1:", "small@2:").replace("  small:", "  small-2:"))


def test_names_are_split_from_versions() -> None:
    assert [split_version(name) for name in ("a", "a@3", "a.b@12")] == [
        ("a", 1),
        ("a", 3),
        ("a.b", 12),
    ]
