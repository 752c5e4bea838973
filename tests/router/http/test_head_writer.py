"""The head of a response goes out with the first piece of its body, and never later than a turn."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from router.frontend.http.head_writer import HeadWriter

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class _Transport:
    """Keeps what is written, one entry for each system call."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def is_closing(self) -> bool:
        return "closed" in self.calls

    def close(self) -> None:
        self.calls.append(b"closed")


def _calls_after(write: Callable[[HeadWriter], Any]) -> tuple[list[bytes], list[bytes]]:
    """Return what reached the transport at once, and what a turn of the loop later."""

    async def run() -> tuple[list[bytes], list[bytes]]:
        transport = _Transport()
        write(HeadWriter(cast(asyncio.Transport, transport), asyncio.get_running_loop()))
        at_once = list(transport.calls)
        await asyncio.sleep(0)
        return at_once, transport.calls

    return asyncio.run(run())


def test_a_head_waits_for_the_body_of_the_same_turn() -> None:
    def write(writer: HeadWriter) -> None:
        writer.write(HEAD)
        writer.write(b"first")
        writer.write(b"second")

    at_once, later = _calls_after(write)
    assert at_once == [HEAD + b"first", b"second"]
    assert later == at_once


def test_a_head_without_a_body_goes_out_in_the_next_turn() -> None:
    at_once, later = _calls_after(lambda writer: writer.write(HEAD))
    assert at_once == []
    assert later == [HEAD]


def test_a_close_comes_after_the_head() -> None:
    def write(writer: HeadWriter) -> None:
        writer.write(HEAD)
        writer.close()

    assert _calls_after(write)[0] == [HEAD, b"closed"]
