"""Fleet file sections on certificates, and the check for plain text between hosts."""

import functools
import ipaddress
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import AfterValidator, Field, StringConstraints

from baton.config.section import Section


def require_absolute(value: str) -> str:
    """Return a path if it is absolute; raise ValueError otherwise."""
    if not Path(value).is_absolute():
        raise ValueError("must be an absolute path: the file is read on every host")
    return value


AbsoluteFile = Annotated[str, StringConstraints(min_length=1), AfterValidator(require_absolute)]
HostName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?$")]


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Certificate files that a process uses towards others of its fleet."""

    certificate: str  # PEM file of the certificate, followed by any intermediate ones
    key: str  # PEM file of the key, not encrypted
    ca: str  # PEM file of the CA that signs all certificates of the fleet
    name: str  # DNS name in every certificate of the fleet


class FleetTlsConfig(Section):
    """Mutual TLS between routers and workers.

    Attributes:
        ca: Absolute path of the CA that signs all certificates of the fleet. It should sign
            nothing else.
        name: DNS name in all certificates; default: ``FLEET.baton.internal``. Addresses change,
            so the fleet is verified and not the address.
    """

    certificate: AbsoluteFile  # absolute path of the certificate on every host
    key: AbsoluteFile  # absolute path of the certificate's key
    ca: AbsoluteFile
    name: HostName | None = None

    def files(self, fleet: str) -> TlsFiles:
        """Return the certificate files for processes of ``fleet``."""
        name = self.name or fleet_host_name(fleet)
        return TlsFiles(certificate=self.certificate, key=self.key, ca=self.ca, name=name)


class HttpsConfig(Section):
    """HTTPS of the routers, with a certificate for the name that clients use."""

    certificate: AbsoluteFile  # absolute path of the certificate on every router's host
    key: AbsoluteFile  # absolute path of the certificate's key


class MonitoringConfig(Section):
    """Port for `/metrics`, `/load`, `/fleet/targets` and the health probes, which needs no key.

    It uses ``clients.tls`` if that is set. Bind it where only the monitoring can reach it: metrics
    name tenants.
    """

    port: Annotated[int, Field(ge=1, le=65_535)]
    host: Annotated[str, StringConstraints(min_length=1)] = "127.0.0.1"


def fleet_host_name(fleet: str) -> str:
    """Return the default DNS name in the certificates of a fleet."""
    return f"{fleet.rstrip('-')}.baton.internal"


def plain_text_problem(host: str, *, tls: bool, insecure: bool) -> str:
    """Return why a router may not listen on ``host``, or "" if it may."""
    if tls or insecure or is_loopback(host):
        return ""
    return (
        "other hosts would send prompts and keys in plain text. Set a certificate, `clients: "
        "{tls: {certificate: FILE, key: FILE}}` (`baton certs DIR` makes one for trials), or set "
        "`clients: {insecure: true}`, such as behind a proxy that terminates TLS"
    )


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this host only."""
    address = address_of(host)
    return address.is_loopback if address is not None else host == "localhost"


def host_name(host: str) -> str:
    """Return a host without the spellings of one address or name."""
    return str(address_of(host) or host.lower().rstrip("."))


@functools.lru_cache(maxsize=256)  # of each request's Host, which is short
def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that ``host`` is; None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
