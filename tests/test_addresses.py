"""Addresses of both versions of IP: joined and split alike everywhere."""

import socket

import pytest

from baton.addresses import family_of, join_address, split_address


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [("10.0.0.1", 80, "10.0.0.1:80"), ("fd00::2", 0, "[fd00::2]:0"), ("node.lan", 1, "node.lan:1")],
)
def test_what_is_joined_is_split_again(host: str, port: int, text: str) -> None:
    assert join_address(host, port) == text
    assert split_address(text) == (host, port)


def test_the_family_is_the_hosts() -> None:
    assert (family_of("::1"), family_of("127.0.0.1")) == (socket.AF_INET6, socket.AF_INET)
