"""Ports that a firewall knows: workers stay within them, or say that all are taken."""

import socket

import pytest

from baton.config.fleet_file import FleetConfig
from baton.types.errors import InternalError
from fleet.ports import free_port, kv_listener


def test_without_a_range_the_kernel_chooses() -> None:
    assert free_port("127.0.0.1", "") == 0


def test_the_one_that_is_free_is_found_and_a_full_range_is_an_error() -> None:
    with socket.create_server(("127.0.0.9", 0)) as taken:
        port = taken.getsockname()[1]
        first = port if port < 65535 else port - 1
        other = first + 1 if first == port else first
        assert free_port("127.0.0.9", f"{first}-{first + 1}") == other
        with socket.create_server(("127.0.0.9", other)):
            with pytest.raises(
                InternalError, match=rf"pools\.ports = {first}-\d+: all ports are taken"
            ):
                free_port("127.0.0.9", f"{first}-{first + 1}")


@pytest.mark.parametrize("text", ["12999-12000", "80-90", "12000", "12000-70000"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ports"):
        FleetConfig.model_validate({"pools": {"ports": text}})
    assert FleetConfig.model_validate({"pools": {"ports": "12000-12999"}}).pools.ports


def test_kv_by_tcp_takes_a_port_only_where_there_are_three_for_each_worker() -> None:
    with socket.create_server(("127.0.0.9", 0)) as some:
        first = min(some.getsockname()[1], 65_000)
    assert kv_listener("127.0.0.9", f"{first}-{first + 4}", 2) is None
    listener = kv_listener("127.0.0.9", f"{first}-{first + 5}", 2)
    assert listener is not None
    with listener:
        assert first <= listener.getsockname()[1] <= first + 5
    anywhere = kv_listener("127.0.0.9", "", 2)
    assert anywhere is not None
    anywhere.close()
