"""What a router's stream carries after a resume."""

import asyncio
import time
from types import SimpleNamespace
from unittest.mock import Mock

from batonpb import common_pb2
from batonpb import decode_pb2 as pb
from batonpb.common_pb2 import SamplingParams, WorkerIdentity

from baton.telemetry.tracing import Tracing
from baton.types import events as ev
from baton.types.params import SampledToken
from baton.wire.tokens import pack_tokens, unpack_tokens
from decode_worker.request import DecodeRequest
from decode_worker.session import MAX_FRAME_BYTES, LoadReport, RouterSession

TOKENS = 100_000


def answered(session: RouterSession) -> DecodeRequest:
    """A request that has a long answer, with 20 log-probabilities for each token."""
    sampling = SamplingParams(max_tokens=TOKENS, n=1, top_p=1, repetition_penalty=1, logprobs=20)
    submission = pb.Submission(
        request_id="a", attempt=1, prompt_tokens=pack_tokens([1, 2, 3]), sampling=sampling
    )
    parts = SimpleNamespace(
        tracing=Tracing("worker"), identity=WorkerIdentity(), engine=Mock(), metrics=Mock()
    )
    request = DecodeRequest(submission, session, parts)
    top = tuple((other, -1.5) for other in range(100_000, 100_020))
    tokens = tuple(SampledToken(number, -0.5, top) for number in range(TOKENS))
    request._on_report(
        ev.Tokens(
            request_id="a",
            choice=0,
            index=0,
            tokens=tokens,
            finish_reason="length",
            stop_token=None,
        )
    )
    return request


async def test_a_long_answer_is_resumed_in_frames_that_grpc_takes() -> None:
    """Suspicion c: a frame above 16 MiB broke the stream, again and again."""
    session = RouterSession("router")
    session.connected()
    request = answered(session)
    stream = session.connected()
    request.resume([0])
    request._on_report(ev.Ended("a", "", ""))
    got, finish, sizes = [], "", []
    async with asyncio.timeout(20):
        async for frame in session.frames(stream, lambda: 0):
            sizes.append(frame.ByteSize())
            for run in frame.tokens:
                assert run.index == len(got)
                assert not finish, "the last run says how the answer ended"
                fresh = unpack_tokens(run.token_ids)
                assert len(run.logprobs) == len(fresh)
                got += fresh
                finish = run.finish_reason
            if frame.ends:
                break
    assert got == list(range(TOKENS))
    assert finish == "length"
    assert sum(sizes) > 16 << 20
    assert max(sizes) <= MAX_FRAME_BYTES + 100


async def test_tokens_join_the_run_before_them_while_the_router_is_behind() -> None:
    session = RouterSession("router")
    stream = session.connected()
    requests = [pb.Submission(request_id=name, attempt=1) for name in "ab"]

    def step(index: int, reason: str = "", logprob: float | None = None) -> None:
        for request in requests:
            tokens = (SampledToken(index, logprob),)
            name = request.request_id
            new = ev.Tokens(
                request_id=name, choice=0, index=index, tokens=tokens, finish_reason=reason
            )
            session.tokens(request, new)

    frames = session.frames(stream, lambda: 0)
    runs = []
    for steps in (range(5), (5, 7), (8, 9, 10)):  # the seventh token is missing
        for index in steps:
            step(index, "length" if index == 10 else "", -0.5 if index == 9 else None)
        got = (await anext(frames)).tokens
        runs.append([(r.index, unpack_tokens(r.token_ids)) for r in got if r.request_id == "b"])
    assert runs == [
        [(0, [0]), (1, [1, 2, 3, 4])],
        [(5, [5]), (7, [7])],
        [(8, [8]), (9, [9]), (10, [10])],
    ]


async def test_a_worker_that_has_nothing_new_says_so_once_a_second() -> None:
    """Four reports a second of each of a thousand idle workers took a router half a core."""
    session, taken = RouterSession("router"), []
    stream = session.connected()

    async def read() -> None:
        async for frame in session.frames(stream, lambda: 0):
            taken.append(frame)  # noqa: PERF401 - seen while it goes on

    reading = asyncio.create_task(read())
    began_ns, tick_ns = time.monotonic_ns(), 250_000_000

    async def tick(number: int, content: bytes) -> None:
        status = common_pb2.WorkerStatus(load_age_ns=number)
        session.report(LoadReport(status=status, content=content), began_ns + number * tick_ns)
        await asyncio.sleep(0)
        session._taken_ns = min(session._taken_ns, began_ns + number * tick_ns)

    await tick(0, b"idle")
    assert len(taken) == 1 and taken.pop().HasField("status")
    for number in range(1, 4):
        await tick(number, b"idle")
    assert not taken
    await tick(6, b"idle")
    (beat,) = taken
    assert not beat.HasField("status"), "a beat costs next to nothing to read"
    await tick(7, b"busy")
    assert len(taken) == 2 and taken[1].HasField("status"), "news do not wait"
    session.end(pb.RequestEnd(request_id="a"))
    await tick(8, b"busy")
    assert taken[-1].HasField("status"), "a router waits for a load without what has ended"
    stream = session.connected()
    session.report(LoadReport(status=common_pb2.WorkerStatus(), content=b"busy"), began_ns)
    assert session._frame.HasField("status"), "another stream knows nothing"
    reading.cancel()


def test_a_worker_without_work_says_so_and_then_only_answers() -> None:
    """A frame a second of each of a thousand workers took a router a quarter of a core."""
    session, now_ns = RouterSession("router"), 0

    def said(content: bytes, at_rest: bytes) -> pb.WorkerFrame | None:
        nonlocal now_ns
        now_ns += 10_000_000_000
        session._dirty.clear()
        session._frame = pb.WorkerFrame()
        session.report(
            LoadReport(status=common_pb2.WorkerStatus(), content=content, at_rest=at_rest), now_ns
        )
        if not session._dirty.is_set():
            return None
        session._acknowledged = session._read
        return session._frame

    for may_rest in (True, False):
        stream = session.connected(may_rest=may_rest)
        first = said(b"idle, 1 step", b"idle")
        assert first is not None
        assert first.status.resting == may_rest
        beat = said(b"idle, 1 step", b"idle")
        assert (beat is None) == may_rest, "a router of before takes silence for a death"
    stream = session.connected(may_rest=True)
    said(b"idle, 1 step", b"idle")
    assert said(b"idle, 5 steps", b"idle") is None, "what a probe changes can wait"
    session.note_frame(stream)
    answer = said(b"idle, 5 steps", b"idle")
    assert answer is not None
    assert answer.HasField("status"), "until the router asks"
    session.note_frame(stream)
    assert said(b"idle, 5 steps", b"idle") == pb.WorkerFrame()
    session.note_frame(stream - 1)
    assert said(b"idle, 5 steps", b"idle") is None, "a frame of an older stream is no question"
    busy = said(b"busy", b"")
    assert busy is not None
    assert not busy.status.resting
    assert said(b"busy", b"") == pb.WorkerFrame(), "with work there is a beat"
