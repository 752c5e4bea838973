"""A fleet of vLLM workers is refused what vLLM does not do, by name and with the fix."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from baton.config.fleet_file import FleetConfig
from baton.engine.settings import ExternalEngine
from baton.engine.vllm.server import command
from fleet.pools.resources import engine_settings
from router.settings import LaneSettings

PYTHON = "/opt/vllm/bin/python"


def config(pools: dict[str, object] | None = None, **more: object) -> FleetConfig:
    vllm = {"python": PYTHON, "args": ["--block-size", 32]}
    own = {"prefill": 0, "decode": 2, "engine": "vllm", "vllm": vllm, **(pools or {})}
    return FleetConfig.model_validate({"numerics": "fast", "pools": own, **more})


def test_the_section_becomes_the_engine_of_every_worker() -> None:
    external = engine_settings(config(), "decode").external
    assert external is not None
    assert (external.kind, external.python) == ("vllm", PYTHON)
    assert external.args == ("--block-size", "32")
    assert external.hand_off == ""
    assert engine_settings(FleetConfig(), "decode").external is None


def test_a_hand_off_lets_a_fleet_have_prefill_workers() -> None:
    handing = {"prefill": 1, "vllm": {"python": PYTHON, "hand_off": "nixl"}}
    external = engine_settings(config(handing), "prefill").external
    assert external is not None
    assert external.hand_off == "nixl"


def test_batons_hand_off_takes_workers_with_gpus() -> None:
    vllm = {"python": PYTHON, "hand_off": "baton", "gpus": 1}
    assert config({"prefill": 1, "vllm": vllm}).pools.gpus == 1


def test_batons_hand_off_takes_tensor_parallelism() -> None:
    vllm = {"python": PYTHON, "hand_off": "baton", "args": ["-tp", "2"]}
    external = engine_settings(config({"prefill": 1, "vllm": vllm}), "prefill").external
    assert external is not None
    assert external.args == ("-tp", "2")


def test_exact_needs_the_batch_invariant_mode() -> None:
    vllm = {"python": PYTHON, "batch_invariant": True}
    settings = engine_settings(config({"vllm": vllm}, numerics="exact"), "decode")
    assert settings.numerics == "exact"
    assert settings.external is not None
    assert settings.external.batch_invariant
    fast = engine_settings(config(), "decode").external
    assert fast is not None
    assert not fast.batch_invariant


def test_adapters_are_served_with_vllms_own_argument() -> None:
    with_lora = {"vllm": {"python": PYTHON, "args": ["--enable-lora", "--max-loras", 4]}}
    fleet = config(with_lora, adapters={"load": {"a": "/a"}, "max_rank": 40})
    external = engine_settings(fleet, "decode").external
    assert external is not None
    assert external.adapters
    assert external.args == (
        *("--max-cpu-loras", "8", "--max-lora-rank", "64"),
        *("--enable-lora", "--max-loras", "4"),
    )
    none = engine_settings(config(with_lora, adapters={"max_loaded": 0}), "decode").external
    assert none is not None
    assert not none.adapters


def test_workers_pull_prefixes_from_a_vllm_only_with_batons_connector() -> None:
    assert not LaneSettings.of(config()).pull_prefixes
    assert LaneSettings.of(FleetConfig()).pull_prefixes
    by_baton = config({"vllm": {"python": PYTHON, "hand_off": "baton"}})
    assert LaneSettings.of(by_baton).pull_prefixes


@pytest.mark.parametrize(
    ("pools", "more", "text"),
    [
        ({}, {"numerics": "exact"}, "numerics: exact: set pools.vllm.batch_invariant"),
        ({}, {"dtype": "bf16"}, "dtype: use pools.vllm.args"),
        ({}, {"kv_blocks_per_worker": 100}, "kv_blocks_per_worker: use pools.vllm.args"),
        ({}, {"quantisation": {"weights": "int8"}}, "quantisation: use pools.vllm.args"),
        ({}, {"speculation": "ngram"}, "speculation: use pools.vllm.args"),
        ({}, {"adapters": {"load": {"a": "/a"}}}, "needs --enable-lora in pools.vllm.args"),
        (
            {"vllm": {"python": PYTHON, "args": ["--lora-modules", "a=/a"]}},
            {},
            "--lora-modules: use `adapters.load`",
        ),
        ({"prefill": 1}, {}, "hand over KV only with `vllm: {hand_off: nixl}`: set it"),
        (
            {"vllm": {"python": PYTHON, "hand_off": "baton", "args": ["-pp", "2"]}},
            {},
            "hand_off: baton copies no KV of pipeline stages: use `nixl`",
        ),
        (
            {
                "vllm": {"python": PYTHON, "hand_off": "nixl"},
                "tls": {"certificate": "/c", "key": "/k", "ca": "/a"},
            },
            {},
            "hand_off: nixl moves KV in plain text",
        ),
        ({"kv_tiers": {"memory_mb": 64}}, {}, "kv_tiers: not for vllm workers"),
        ({"tensor_parallel": 2}, {}, "use `--tensor-parallel-size` in pools.vllm.args"),
        ({"vllm": None}, {}, "need each other"),
        ({"engine": "real"}, {}, "need each other"),
        ({"vllm": {"python": "bin/python"}}, {}, "absolute"),
        ({"vllm": {"python": PYTHON, "args": "--x"}}, {}, "must be a list of words"),
    ],
)
def test_what_vllm_workers_do_not_do_is_refused(
    pools: dict[str, object], more: dict[str, object], text: str
) -> None:
    with pytest.raises(ValidationError, match="vllm") as caught:
        config(pools, **more)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("--port", "remove it"),
        ("--port=8000", "remove it"),
        ("--max-model-len", "use `max_context_tokens` of the fleet file"),
        ("--max_model_len", "use `max_context_tokens` of the fleet file"),
        ("--structured-outputs-config.backend", "workers set its backend to `guidance`"),
        ("--kv-transfer-config", "use `hand_off`"),
    ],
)
def test_arguments_that_workers_set_are_refused_with_the_key_to_use(
    argument: str, fix: str
) -> None:
    with pytest.raises(ValidationError, match="args: --") as caught:
        config({"vllm": {"python": PYTHON, "args": [argument]}})
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    "args",
    [
        ["--tensor-parallel-size", 4],
        ["--tensor_parallel_size=4"],
        ["-tp", "1", "-tp", "4"],
        ["-tp", 2, "-pp", 2],
    ],
)
def test_gpus_must_suffice_for_the_parallel_sizes_of_vllm(args: list[object]) -> None:
    vllm = {"python": PYTHON, "args": args}
    for enough in (0, 4, 5):
        assert config({"vllm": {**vllm, "gpus": enough}}).pools.gpus == enough
    with pytest.raises(ValidationError, match="gpus: 3, but the parallel sizes in args need 4"):
        config({"vllm": {**vllm, "gpus": 3}})


def test_kv_tiers_of_vllm_are_memory_below_gpus() -> None:
    vllm = {"python": PYTHON, "gpus": 1, "kv_tiers": {"memory_mb": 512}}
    settings = engine_settings(config({"vllm": vllm}), "decode")
    assert settings.kv_tiers.names == ("memory",)
    line = command(ExternalEngine(kind="vllm", python=PYTHON), settings, Path(), Path())
    connector = line[line.index("--kv-transfer-config") + 1]
    assert '"kv_connector":"OffloadingConnector"' in connector
    assert f'"cpu_bytes_to_use":{512 << 20}' in connector
    for other, why in (
        ({"gpus": 0}, "refuses to start on CPUs: set `gpus`"),
        ({"hand_off": "baton"}, "cannot be combined with `hand_off`"),
    ):
        with pytest.raises(ValidationError, match=why):
            config({"vllm": {**vllm, **other}})
    with pytest.raises(ValidationError, match=r"kv_tiers: not for vllm workers; vllm has `vllm: "):
        config({"kv_tiers": {"memory_mb": 512}})
    shared = {"disk_mb": 512, "disk_folder": "/kv", "disk_shared": True}
    with pytest.raises(ValidationError, match="checks no digests of the files that it reads"):
        config({"kv_tiers": shared})


def test_workers_share_the_disk_beside_their_own_folders() -> None:
    shared = {"disk_mb": 512, "disk_folder": "/kv", "disk_shared": True}
    fleet = FleetConfig.model_validate({"model": "/m", "fleet": "x", "pools": {"kv_tiers": shared}})
    tiers = [engine_settings(fleet, "decode", f"worker-{number}").kv_tiers for number in (0, 1)]
    assert all(one.disk_shared for one in tiers)
    assert [one.disk_folder for one in tiers] == ["/kv/x/worker-0", "/kv/x/worker-1"]


def test_prefill_workers_may_have_another_width() -> None:
    vllm = {"python": PYTHON, "args": ["-tp", 4], "prefill_args": ["-tp", 2], "hand_off": "baton"}
    fleet = config({"prefill": 1, "decode": 1, "vllm": vllm})
    settings = [engine_settings(fleet, role).external for role in ("prefill", "decode")]
    assert [one.args for one in settings if one] == [("-tp", "4", "-tp", "2"), ("-tp", "4")]
    assert fleet.pools.roles_differ
    for other in ({"hand_off": "nixl"}, {"batch_invariant": True}):
        with pytest.raises(ValidationError, match="unequal width need `hand_off: baton`"):
            config({"prefill": 1, "decode": 1, "vllm": {**vllm, **other}})
    with pytest.raises(ValidationError, match="parallel sizes in args need 8"):
        config({"vllm": {**vllm, "gpus": 4, "prefill_args": ["-tp", 8]}})
    with pytest.raises(ValidationError, match="args: --port"):
        config({"vllm": {**vllm, "prefill_args": ["--port", 8]}})
