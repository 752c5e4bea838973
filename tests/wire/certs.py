"""Certificates for tests: real ones, made by the code behind `baton certs`."""

from datetime import timedelta
from pathlib import Path

from baton.config.network import TlsFiles
from fleet.cli import certificate_authority as certificates

NAME = "test.baton.internal"
DAY = timedelta(days=1)
EXPIRED = timedelta(minutes=-5)


def made(folder: Path, name: str = NAME, valid: timedelta = DAY) -> Path:
    """A folder with a CA of its own; its certificates can be used for so long."""
    certificates.make(folder, name, [], valid)
    return folder


def files(folder: Path, name: str = NAME) -> TlsFiles:
    """What processes of the fleet in that folder are told."""
    return TlsFiles(
        certificate=str(folder / "fleet.pem"),
        key=str(folder / "fleet.key"),
        ca=str(folder / "ca.pem"),
        name=name,
    )
