"""What only a two-rank group can do wrong: a collective that hangs, helpers that stay behind."""

import asyncio
import os
import signal

import psutil
import pytest

from kvtransfer.pair import pulling
from kvtransfer.pair.sending import NAME
from kvtransfer.transport import TransportError
from tests.kvtransfer.edge_ends import SendingEnd, reading_end, slices
from tests.kvtransfer.test_transports import until

pytestmark = pytest.mark.slow  # each group has two processes, which import torch


def helpers() -> list[psutil.Process]:
    """Of all groups that this process has an end of."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "baton.engine.process.pair" in child.cmdline()
    ]


@pytest.mark.parametrize("rank", ["0", "1"])
async def test_a_helper_that_stands_still_ends_its_own_edge_alone(rank: str) -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        async with SendingEnd().served() as other_peer, reading_end(NAME) as other:
            assert set(await other.fetch(other_peer, slices())) == {None}
            others = {helper.pid for helper in helpers()}
            assert set(await ours.fetch(peer, slices())) == {None}
            mine = [helper for helper in helpers() if helper.pid not in others]
            assert len(mine) == 2
            (stopped,) = [h for h in mine if h.cmdline()[h.cmdline().index("-m") + 2] == rank]
            os.kill(stopped.pid, signal.SIGSTOP)
            with pytest.raises(TransportError):
                async with asyncio.timeout(pulling.RECEIVE_S + 20):
                    await ours.read(peer, slices())
            await until(lambda: {helper.pid for helper in helpers()} == others)
            assert set(await other.fetch(other_peer, slices())) == {None}, "the other edge goes on"
            assert set(await ours.fetch(peer, slices())) == {None}, "and a new group is opened"


async def test_no_helper_outlives_its_edge() -> None:
    async with SendingEnd().served() as peer:
        async with reading_end(NAME) as ours:
            assert set(await ours.fetch(peer, slices())) == {None}
            assert len(helpers()) == 2
        await until(lambda: not helpers())
