"""A router's stream to a worker by TLS: trusted, mistrusted and said why, rotated under way."""

from pathlib import Path

import pytest

from baton.wire.tls import FleetTls
from tests.router.conftest import record_of, until
from tests.router.emulated_worker import EmulatedWorker
from tests.wire.certs import files, made


async def shown(fleet) -> dict:
    return (await fleet.http.get("/fleet")).json()["workers"][0]


async def test_a_router_and_a_worker_of_one_fleet(make_fleet, tmp_path: Path) -> None:
    """Certificates are replaced while the stream stands; when it breaks, the new ones count."""
    folder = made(tmp_path / "certs")
    worker = EmulatedWorker("decode-0")
    await worker.start(tls=FleetTls(files(folder)))
    fleet = await make_fleet({}, tls=FleetTls(files(folder)))
    try:
        fleet.directory.put(record_of("decode-0", worker.address, "decode"))
        await until(lambda: fleet.lane.gateway.workers.usable)
        newer = made(tmp_path / "newer")
        for name in ("ca.pem", "fleet.key", "fleet.pem"):
            (newer / name).replace(folder / name)
        assert (await fleet.complete()).status_code == 200, "over the stream that stood before"
        port = int(worker.address.rpartition(":")[2])
        await worker.stop()
        await until(lambda: not fleet.lane.gateway.workers.usable)
        await worker.start(port, FleetTls(files(folder)))  # knows nothing of the old CA
        await until(lambda: fleet.lane.gateway.workers.usable)
        assert (await fleet.complete()).status_code == 200
        assert (await shown(fleet))["refused"] == ""
    finally:
        await worker.stop()


@pytest.mark.parametrize("wrong", ["another CA", "plain text"])
async def test_a_worker_that_is_not_trusted_is_named_with_the_reason(
    make_fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    worker = EmulatedWorker("decode-0")
    theirs = FleetTls(files(made(tmp_path / "other"))) if wrong == "another CA" else None
    await worker.start(tls=theirs)
    fleet = await make_fleet({}, tls=FleetTls(files(made(tmp_path / "certs"))))
    try:
        fleet.directory.put(record_of("decode-0", worker.address, "decode"))
        links = fleet.lane.gateway.workers
        await until(lambda: any(slot.refusal for slot in links))
        told = "not valid for this fleet" if wrong == "another CA" else "it uses plain text"
        assert told in (await shown(fleet))["refused"]
        assert caplog.text.count(told) == 1, "once, though it is tried again and again"
        assert (await fleet.complete()).status_code == 503
    finally:
        await worker.stop()
