"""Who may have KV of whom: certificates between workers, and the router's word for each pull."""

import ssl
import time
from pathlib import Path

import grpc.aio
import httpx
import msgspec
import pytest
from batonpb import decode_pb2 as pb

from baton.registry.types import WorkerRecord
from baton.types.errors import InternalError
from baton.wire.capability import sign
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_options import open_channel
from baton.wire.tls import CertificateError, FleetTls
from fleet.worker.worker import Worker
from tests.wire.certs import files, made
from tests.workers.harness import (
    TOKEN,
    MiniRouter,
    WorkerProcess,
    emulated_settings,
    routed,
    workers,
)
from tests.workers.test_transports import PROMPT, PROMPT_BYTES, counted, same_tokens

GRPC_ONLY = {"transports": ("grpc",)}


async def test_a_hand_off_by_tls_and_with_the_routers_word(tmp_path: Path) -> None:
    folder = made(tmp_path / "certs")
    tls = msgspec.to_builtins(files(folder))
    async with workers("prefill-0", "decode-0", tls=tls, **GRPC_ONLY) as (prefill, decode):
        async with routed(decode, tls=FleetTls(files(folder))) as router:
            await router.submit("a", PROMPT, prefill)
            await same_tokens(router, "a", PROMPT)
            router.target = _unsigned
            await router.submit("b", [5, *PROMPT], prefill)
            await router.until(lambda: router.asks or "b" in router.ends, 10.0)
            if router.asks:
                answer = pb.PrefillReplacement(request_id="b", attempt=1, compute_locally=True)
                await router.send(replacement=answer)
            await same_tokens(router, "b", [5, *PROMPT])
            await router.baseline()
        page = f"https://{decode.record.metrics_address}/metrics"
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        async with httpx.AsyncClient(verify=context) as stranger:
            with pytest.raises(httpx.TransportError):
                await stranger.get(page)
        context.load_cert_chain(folder / "fleet.pem", folder / "fleet.key")
        async with httpx.AsyncClient(verify=context) as prometheus:
            text = (await prometheus.get(page)).text
        labels = 'encoding="plain",transport="grpc"'
        assert f"baton_pulled_bytes_total{{{labels}}} {PROMPT_BYTES}" in text.replace(
            'model="emulated",', ""
        ), "of the first, and nothing of the second"
        plain = MiniRouter(decode)
        plain._channel = open_channel(decode.record.address)
        call = plain._channel.stream_stream("/baton.v1.Decode/Serve")(timeout=10)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await plain._channel.close()


@pytest.mark.slow
async def test_a_decode_worker_of_another_ca_gets_nothing_and_says_so(tmp_path: Path) -> None:
    folder, other = made(tmp_path / "certs"), made(tmp_path / "other")
    tls = {"prefill_tls": files(folder), "decode_tls": files(other)}
    async with workers("prefill-0", "decode-0", **tls, **GRPC_ONLY) as (prefill, decode):
        async with routed(decode, tls=FleetTls(files(other))) as router:
            await router.submit("a", PROMPT, prefill)
            await router.until(lambda: router.asks, 10.0)
            ask = router.asks.pop()
            assert "not valid for this fleet" in ask.reason.message
            assert not ask.peer_died, "nobody died: it is a question of trust"
            answer = pb.PrefillReplacement(request_id="a", attempt=1, compute_locally=True)
            await router.send(replacement=answer)
            assert not (await router.ended("a")).HasField("error")
            await router.baseline()


def _unsigned(prefill: WorkerProcess, request_id: str, reader: WorkerRecord) -> pb.PrefillTarget:
    target = WorkerProcess.target(prefill, request_id, reader)
    target.ClearField("capability")
    return target


def _of_another_request(
    prefill: WorkerProcess, request_id: str, reader: WorkerRecord
) -> pb.PrefillTarget:
    return WorkerProcess.target(prefill, "another", reader)


def _of_long_ago(prefill: WorkerProcess, request_id: str, reader: WorkerRecord) -> pb.PrefillTarget:
    target = WorkerProcess.target(prefill, request_id, reader)
    days_ago_s = time.time() - 3 * 24 * 3600
    holder = prefill.record.incarnation
    target.capability = sign(FleetToken(TOKEN), request_id, holder, reader.incarnation, days_ago_s)
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (_unsigned, "missing"),
        (_of_another_request, "forged"),
        (_of_long_ago, "expired"),
    ],
)
async def test_kv_without_the_routers_word_is_not_handed_over(target, reason: str) -> None:
    """By lent pages and by gRPC alike; the request goes on without it."""
    async with workers("prefill-0", "decode-0") as (prefill, decode):
        async with routed(decode) as router:
            router.target = target
            await router.submit("a", PROMPT, prefill)
            await router.until(lambda: router.asks or "a" in router.ends, 10.0)
            if router.asks:
                answer = pb.PrefillReplacement(request_id="a", attempt=1, compute_locally=True)
                await router.send(replacement=answer)
            await same_tokens(router, "a", PROMPT)
            assert await counted(decode.record, "baton_pulled_bytes") == {}
            refused = await counted(prefill.record, "baton_pulls_refused")
            assert set(refused) == {f'reason="{reason}"'}
            router.target = WorkerProcess.target
            await router.submit("b", PROMPT[1:], prefill)
            await same_tokens(router, "b", PROMPT[1:])
            assert await counted(decode.record, "baton_pulled_bytes")
            await router.baseline()


@pytest.mark.slow
async def test_an_upgrade_may_let_pulls_without_a_word_through() -> None:
    async with workers("prefill-0", "decode-0", unsigned_pulls=True) as (prefill, decode):
        async with routed(decode) as router:
            router.target = _unsigned
            await router.submit("a", PROMPT, prefill)
            await same_tokens(router, "a", PROMPT)
            assert await counted(decode.record, "baton_pulled_bytes")
            assert await counted(prefill.record, "baton_pulls_refused") == {}


async def test_plain_text_to_other_hosts_must_be_meant(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"host = 0.0.0.0: .* `pools: \{insecure: true\}`"):
        await Worker.start(emulated_settings("decode-0", host="0.0.0.0"))
    tls = files(made(tmp_path / "certs"))
    for plain in ("pair", "tcp"):
        with pytest.raises(InternalError, match=rf"{plain} sends KV in plain text"):
            await Worker.start(emulated_settings("decode-0", tls=tls, transports=(plain,)))
    (tmp_path / "certs" / "fleet.key").unlink()
    with pytest.raises(CertificateError, match=r"fleet\.key cannot be read"):
        await Worker.start(emulated_settings("decode-0", tls=tls))


@pytest.mark.slow
async def test_the_fleets_token_is_replaced_while_a_worker_serves(tmp_path: Path) -> None:
    """Both are valid while both stand in the file; then the old one is refused."""
    file = tmp_path / "token"
    file.write_text("the-old-token-of-the-fleet\n")
    async with workers("decode-0", fleet_token_file=str(file)) as (decode,):
        channel = open_channel(decode.record.address)
        submit = channel.unary_unary(
            "/baton.v1.Decode/Submit", request_serializer=pb.Submission.SerializeToString
        )

        async def accepted(token: str) -> bool:
            try:
                await submit(pb.Submission(), metadata=FleetToken(token).metadata, timeout=10)
            except grpc.aio.AioRpcError as error:
                return error.code() is not grpc.StatusCode.UNAUTHENTICATED
            return True

        old, new = "the-old-token-of-the-fleet", "the-new-token-of-the-fleet"
        assert [await accepted(old), await accepted(new)] == [True, False]
        file.write_text(f"{new}\n{old}\n")
        assert [await accepted(old), await accepted(new)] == [True, True]
        file.write_text(f"{new}\n")
        assert [await accepted(old), await accepted(new)] == [False, True]
        await channel.close()
