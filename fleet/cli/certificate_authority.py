"""A private CA for trials, with one certificate for the fleet and one for its routers.

DIR/ca.pem      trusted by all               ca.key      signing key: not on the fleet's hosts
DIR/fleet.pem   between routers and workers  fleet.key   on every host
DIR/router.pem  HTTPS of routers             router.key  on the routers' hosts
"""

import contextlib
import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.folders import replace_file
from baton.wire.tls import CertificateError

CA = "ca"
FLEET = "fleet"
ROUTER = "router"
_CA_VALID = timedelta(days=3650)
_CLOCKS_DIFFER = timedelta(minutes=20)  # valid on hosts whose clock is late
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class _Signer(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make(folder: Path, name: str, hosts: Sequence[str], valid: timedelta) -> None:
    """Make a CA and both certificates in a new or empty folder.

    ``name`` is the fleet's DNS name, ``hosts`` are those of the routers and of Ray's nodes.

    Raises:
        CertificateError: The folder has a CA already.
    """
    if (folder / f"{CA}.key").exists():
        raise CertificateError(
            f"{folder} already has a CA: renew its certificates with `baton certs {folder} --renew`"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    signer = _make_ca(name)
    _write(folder, CA, signer.certificate, signer.key)
    _sign(folder, FLEET, signer, [name, *_LOOPBACK, *hosts], valid)
    _sign(folder, ROUTER, signer, [*_LOOPBACK, *hosts], valid)


def renew(folder: Path, hosts: Sequence[str], valid: timedelta) -> None:
    """Replace both certificates and their keys, and add ``hosts``; the CA stays.

    Raises:
        CertificateError: The CA or a certificate is missing or cannot be read.
    """
    signer = _read_ca(folder)
    for kind in (FLEET, ROUTER):
        names = [*_names_in(folder / f"{kind}.pem"), *hosts]
        _sign(folder, kind, signer, list(dict.fromkeys(names)), valid)


def expires_on(file: Path) -> datetime:
    """Return the time at which a certificate expires."""
    return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc


def _make_ca(name: str) -> _Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(f"Baton private CA of {name}")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(subject, subject, key.public_key(), _CA_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Signer(certificate, key)


def _read_ca(folder: Path) -> _Signer:
    try:
        certificate = x509.load_pem_x509_certificate((folder / f"{CA}.pem").read_bytes())
        raw = (folder / f"{CA}.key").read_bytes()
        key = serialization.load_pem_private_key(raw, password=None)
    except (OSError, ValueError, TypeError) as error:
        raise CertificateError(
            f"cannot read the CA in {folder}: {error}; make one with `baton certs {folder}`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{folder / f'{CA}.key'} was not made by `baton certs`")
    return _Signer(certificate, key)


def _names_in(file: Path) -> list[str]:
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"cannot renew {file}: {error}") from error
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = names.get_values_for_type(x509.IPAddress)
    return [*names.get_values_for_type(x509.DNSName), *map(str, addresses)]


def _sign(folder: Path, kind: str, signer: _Signer, names: Sequence[str], valid: timedelta) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH]
    if kind == FLEET:
        uses.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
    certificate = (
        _builder(_named(names[0]), signer.certificate.subject, key.public_key(), valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(list(map(_general, names))), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(authority, critical=False)
        .sign(signer.key, hashes.SHA256())
    )
    _write(folder, kind, certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _general(name: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)


def _write(
    folder: Path, kind: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    """Write the key first: a reader that finds a mismatched pair keeps its old one."""
    raw = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    replace_file(folder / f"{kind}.key", raw, durable=True)
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    replace_file(folder / f"{kind}.pem", pem, durable=True)
