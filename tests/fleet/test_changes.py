"""What a changed file means for a fleet that runs."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from baton.config.clients import ApiKeyConfig
from baton.config.fleet_file import FleetConfig
from baton.config.pools import PoolsConfig
from baton.telemetry.progress import Progress
from fleet.cli import lifecycle as reconcile
from fleet.local.changes import Changes, changes, keys_digest

POOLS = {"prefill": 1, "decode": 2, "engine": "emulated"}
OLD = FleetConfig.model_validate({"fleet": "f", "pools": POOLS, "kv_blocks_per_worker": 64})


def after(**more: object) -> Changes:
    pools = {**POOLS, **dict(more.pop("pools", {}))}  # type: ignore[call-overload]
    fields = {"fleet": "f", "pools": pools, "kv_blocks_per_worker": 64, **more}
    return changes(OLD, FleetConfig.model_validate(fields))


def test_the_same_file_changes_nothing() -> None:
    assert after() == Changes()
    assert after().lines == ["nothing has changed"]


def test_sizes_add_and_remove_and_leave_the_others_alone() -> None:
    found = after(pools={"prefill": 2, "decode": 4})
    assert (found.added, found.removed) == (("1 prefill worker", "2 decode workers"), ())
    assert after(pools={"decode": 1}).removed == ("1 decode worker",)
    assert found.renewed == () and not found.router


def test_workers_turn_before_any_is_started_or_stopped() -> None:
    found = after(pools={"prefill": 2, "decode": 1})
    assert found.turned == ("1 decode worker",)
    assert (found.added, found.removed, found.renewed) == ((), (), ())
    found = after(pools={"prefill": 3, "decode": 1})
    assert (found.turned, found.added) == (("1 decode worker",), ("1 prefill worker",))


def test_workers_of_other_widths_do_not_turn() -> None:
    wide = OLD.model_copy(update={"pools": PoolsConfig(decode=2, tensor_parallel={"decode": 2})})
    sizes = {"prefill": 2, "decode": 1}
    other = wide.model_copy(update={"pools": wide.pools.model_copy(update=sizes)})
    found = changes(wide, other)
    assert (found.turned, found.added) == ((), ("1 prefill worker",))
    assert found.removed == ("1 decode worker",)


def test_other_sizes_renew_nobody_whose_blocks_are_counted_by_the_worker_itself() -> None:
    auto = OLD.model_copy(update={"kv_blocks_per_worker": "auto"})
    grown = auto.model_copy(update={"pools": OLD.pools.model_copy(update={"decode": 3})})
    found = changes(auto, grown)
    assert found.added == ("1 decode worker",)
    assert found.renewed == ()


@pytest.mark.parametrize(
    "more",
    [
        {"kv_blocks_per_worker": 128},
        {"cpus_per_rank": 0.5},
        {"threads_per_rank": 2},
        {"pools": {"ports": "12000-12099"}},
        {"max_step_tokens": 256},
    ],
)
def test_what_workers_are_started_with_renews_them(more: dict[str, object]) -> None:
    found = after(**more)
    assert found.renewed == ("1 prefill worker", "2 decode workers")
    assert not found.router


def test_a_worker_that_is_added_is_not_renewed_as_well() -> None:
    found = after(kv_blocks_per_worker=128, pools={"decode": 3})
    assert found.added == ("1 decode worker",)
    assert found.renewed == ("1 prefill worker", "2 decode workers")


@pytest.mark.parametrize(
    "more",
    [
        {"api_keys": {"a-long-key": "tenant"}},
        {"max_queued_requests": 7},
        {"default_timeout_s": 9.0},
        {"share_cache_between_tenants": True},
        {"pools": {"pull_prefixes": False}},
        {"chat_template": "other.jinja"},
    ],
)
def test_what_routers_read_gives_the_router_a_successor(more: dict[str, object]) -> None:
    found = after(**more)
    assert found.router
    assert found.renewed == ()


def test_a_batch_size_is_of_both() -> None:
    found = after(max_batch_requests=8)
    assert found.router and len(found.renewed) == 2


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"model": "elsewhere.gguf"}, "model"),
        ({"numerics": {"mode": "exact", "native": "tile"}}, "numerics"),
        ({"port": 9000}, "port"),
        ({"redis": "redis://h/0"}, "redis"),
        ({"logs": {"dir": "/var/log/baton"}}, "logs.dir"),
        ({"pools": {"engine": {"emulated": "h100-70b"}}}, "pools.engine"),
        ({"pools": {"token_file": "/etc/baton/new.token"}}, "pools.token_file"),
    ],
)
def test_what_cannot_change_is_refused_by_name_and_nothing_else_is_done(
    more: dict[str, object], key: str
) -> None:
    found = after(**{"max_queued_requests": 7, **more})
    assert found.refused and found.refused[0].startswith(
        f"{key} cannot change while the fleet runs"
    )
    assert not (found.added or found.removed or found.renewed or found.router)
    assert found.lines == list(found.refused)


def test_keys_are_compared_without_being_kept() -> None:
    keys = {"key-of-team-a": ApiKeyConfig.model_validate("team-a")}
    with_keys = OLD.model_copy(update={"api_keys": keys})
    digest = keys_digest(with_keys, "salt")
    assert digest == keys_digest(with_keys, "salt") != keys_digest(OLD, "salt")
    assert digest != keys_digest(with_keys, "other salt")
    assert changes(OLD, with_keys, same_keys=True) == Changes()
    assert changes(OLD, with_keys, same_keys=False).keys == ("api_keys",)


def test_the_command_shows_what_a_change_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is silent until the last worker is ready."""

    def states() -> Iterator[SimpleNamespace]:
        for awaited in ("", "worker-2", "worker-2", "the new routers"):
            yield SimpleNamespace(
                running=True, changes_done=0, change_problem="", change_awaits=awaited
            )
        yield SimpleNamespace(running=True, changes_done=1, change_problem="", change_awaits="")

    found = states()
    monkeypatch.setattr(reconcile.fleet_state, "load", lambda _: next(found))
    monkeypatch.setattr(reconcile, "_POLL_S", 0.0)
    told: list[str] = []
    before = SimpleNamespace(name="f", changes_done=0)
    reconcile._wait_until_changed(before, Progress(told.append))
    assert told == ["waiting for worker-2", "waiting for the new routers"]
