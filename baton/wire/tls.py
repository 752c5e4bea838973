"""Mutual TLS between the processes of a fleet, with certificates from files.

Clients verify the fleet's name, not the address: addresses change with every worker, and any
certificate of the fleet's CA may serve as any of its workers. The incarnation identifies a worker.
A replaced certificate is used by new connections at both ends; open connections keep the old one.
"""

import contextlib
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

import grpc

from baton.config.network import TlsFiles
from baton.config.watched_files import WatchedFiles
from baton.folders import read_small

_RENEW_HINT = "`baton certs DIR --renew` renews the files of `baton certs DIR`"


class CertificateError(ValueError):
    """A certificate, its key or its CA is not usable; the message names the file."""


class _Bundle(NamedTuple):
    certificate: bytes
    key: bytes
    ca: bytes


class FleetTls:
    """Current TLS credentials of one process.

    Args:
        files: Paths of the PEM files, which are read and checked at once.

    Raises:
        CertificateError: A file is not usable.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.name = files.name
        self._files = files
        self._page: ssl.SSLContext | None = None
        self._bundle = WatchedFiles((files.certificate, files.key, files.ca), self._read)
        self._made_of: _Bundle | None = None
        self._channel: grpc.ChannelCredentials | None = None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of new channels; the same object while the files are unchanged."""
        bundle = self._bundle.current
        if self._channel is None or bundle is not self._made_of:
            self._made_of = bundle
            self._channel = grpc.ssl_channel_credentials(bundle.ca, bundle.key, bundle.certificate)
        return self._channel

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a port, which requires client certificates and sends our newest."""
        shown = self._bundle.current

        def newest() -> grpc.ServerCertificateConfiguration:
            nonlocal shown
            bundle = self._bundle.current
            if bundle is shown:
                return None  # type: ignore[return-value] # "unchanged", which its stub leaves out
            shown = bundle
            return _configuration(bundle)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(shown), newest, require_client_authentication=True
        )

    def page_context(self) -> ssl.SSLContext:
        """Return the context of an HTTPS page for the fleet, such as the metrics page.

        It follows the files when a connection or a channel of this process checks them.
        """
        context = self._page = self._made_page()
        use_newest(context, lambda: self._page or context)
        return context

    def _made_page(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.certificate, self._files.key)
        context.load_verify_locations(self._files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _read(self) -> _Bundle:
        bundle = _read(self._files)
        if self._page is not None:
            self._page = self._made_page()
        return bundle


def use_newest(context: ssl.SSLContext, newest: Callable[[], ssl.SSLContext]) -> None:
    """Let new connections of a server's context use another one.

    If it loaded new files itself, it would keep old CAs, and old keys of another kind than the new.
    """

    def on_hello(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = newest()

    context.sni_callback = on_hello  # is called without a name in the handshake, too


def check_pair(certificate: str, key: str) -> None:
    """Check that a certificate and its key are readable, match, and are valid now.

    Raises:
        CertificateError: They are not.
    """
    for file, what in ((certificate, "the certificate"), (key, "the key")):
        _contents(file, what)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate, key, password=lambda: b""
        )
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise CertificateError(
            f"the certificate {certificate} and the key {key} cannot be used together ({reason}): "
            f"they must be PEM, of one another, and the key must have no password; {_RENEW_HINT}"
        ) from error
    _check_time(certificate)


def _read(files: TlsFiles) -> _Bundle:
    check_pair(files.certificate, files.key)
    _check_name(files)
    ca = _contents(files.ca, "the CA")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise CertificateError(f"the CA {files.ca} is not a PEM certificate") from error
    _check_time(files.ca)
    certificate = _contents(files.certificate, "the certificate")
    return _Bundle(certificate, _contents(files.key, "the key"), ca)


def _contents(file: str, what: str) -> bytes:
    try:
        return read_small(file)
    except OSError as error:
        raise CertificateError(
            f"{what} {file} cannot be read: {error.strerror}; it must be on every host, and "
            "readable by the user that runs this process"
        ) from error


def _check_time(file: str) -> None:
    from cryptography import x509  # slow to import: only with TLS

    certificate = x509.load_pem_x509_certificate(_contents(file, "the certificate"))
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc < now:
        raise CertificateError(
            f"{file} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; {_RENEW_HINT}"
        )
    if certificate.not_valid_before_utc > now:
        raise CertificateError(
            f"{file} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, but the "
            f"clock of this host shows {now:%Y-%m-%d %H:%M}: one of them is wrong"
        )


def _check_name(files: TlsFiles) -> None:
    """Check the name here: peers would refuse a wrong one without an error in this process."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(_contents(files.certificate, "the certificate"))
    names: list[str] = []
    with contextlib.suppress(x509.ExtensionNotFound):
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = extension.value.get_values_for_type(x509.DNSName)
    if files.name not in names:
        raise CertificateError(
            f"{files.certificate} is for {', '.join(names) or 'no name'}, but the fleet requires "
            f"{files.name}: create one with this name (`baton certs DIR FLEET_FILE`), or set "
            "`pools: {tls: {name: …}}` to the certificate's name"
        )


def _configuration(bundle: _Bundle) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(bundle.key, bundle.certificate)], root_certificates=bundle.ca
    )


def distrust(reason: str) -> str:
    """Explain gRPC's reason of a failure if it concerns the fleet token or TLS; "" otherwise."""
    if "fleet token" in reason:
        return f"{reason}: both need the same `BATON_FLEET_TOKEN_FILE` or `pools: token_file`"
    if "CERTIFICATE_VERIFY_FAILED" in reason or "Hostname Verification" in reason:
        return (
            "its certificate is not valid for this fleet: signed by another CA, expired, or for "
            f"another name than the fleet's ({_tail(reason)})"
        )
    if "WRONG_VERSION_NUMBER" in reason or "wrong version number" in reason.lower():
        return "it uses plain text and this process TLS: set `pools: {tls: …}` for both"
    if "tcp handshaker" in reason:  # the connection ended early, with TLS or without
        return ""
    if "handshake" in reason.lower() or "SSL_ERROR" in reason:
        return f"the TLS handshake failed: {_tail(reason)}"
    return ""


def _tail(reason: str) -> str:
    return reason.rpartition("last error: ")[2][-200:]
