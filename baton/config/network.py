"""What the fleet file says of certificates, and where plain text would leave this host."""

import ipaddress
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

_EVERYWHERE = "it is read on every host, so it must be an absolute path"


def _is_absolute(value: str) -> str:
    if not Path(value).is_absolute():
        raise ValueError(_EVERYWHERE)
    return value


AbsoluteFile = Annotated[str, StringConstraints(min_length=1), AfterValidator(_is_absolute)]
HostName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?$")]


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process finds what it shows to others of its fleet, and what it believes.

    Attributes:
        certificate: PEM; followed by those between it and the CA, if there are any.
        key: PEM, not encrypted.
        ca: PEM; who is signed by it belongs to the fleet.
        name: That every certificate of the fleet carries.
    """

    certificate: str
    key: str
    ca: str
    name: str


class FleetTlsConfig(BaseModel):
    """TLS between routers and workers, in both directions: each shows a certificate.

    Attributes:
        certificate: A file on every host.
        key: Its key.
        ca: Signs all certificates of the fleet, and should sign nothing else.
        name: A DNS name that all of them carry; default: ``FLEET.baton.internal``. Addresses come
            and go, so it is the fleet that is verified and not the address.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    certificate: AbsoluteFile
    key: AbsoluteFile
    ca: AbsoluteFile
    name: HostName | None = None

    def files(self, fleet: str) -> TlsFiles:
        """As processes of that fleet are told."""
        name = self.name or fleet_host_name(fleet)
        return TlsFiles(certificate=self.certificate, key=self.key, ca=self.ca, name=name)


class HttpsConfig(BaseModel):
    """HTTPS of the routers.

    Attributes:
        certificate: A file on every router's host, for the name by which clients know it.
        key: Its key.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    certificate: AbsoluteFile
    key: AbsoluteFile


def fleet_host_name(fleet: str) -> str:
    """The name that certificates of a fleet carry."""
    return f"{fleet.rstrip('-')}.baton.internal"


def plain_text_problem(host: str, *, tls: bool, insecure: bool) -> str:
    """Why a router may not listen there, if it may not; else ""."""
    if tls or insecure or is_loopback(host):
        return ""
    return (
        "other hosts would send prompts and keys in plain text. Name a certificate, `clients: "
        "{tls: {certificate: FILE, key: FILE}}` (`baton certs DIR` makes one for trials), or say "
        "`clients: {insecure: true}`, as behind a proxy that does TLS"
    )


def is_loopback(host: str) -> bool:
    """Whether what listens there is reached from this host alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
