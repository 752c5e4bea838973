"""TLS settings of commands that connect to a router by HTTPS."""

import contextlib
import os
import socket
import ssl
from collections.abc import Iterable
from urllib.parse import urlsplit

_CONNECT_S = 2.0


def trusted(certificate: str = "") -> ssl.SSLContext:
    """Return the TLS context of a client that trusts one certificate, whatever its names.

    Without a certificate it trusts this machine's CAs, or those in the file that ``SSL_CERT_FILE``
    names (``baton --cacert FILE``).
    """
    if not certificate:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


def authority_for(url: str, files: Iterable[str]) -> str | None:
    """Return the CA file that a client needs for an HTTPS server, or "" if it needs none.

    It needs none if this machine's CAs, without ``SSL_CERT_FILE``, have signed the certificate.

    ``files``: files that may contain its CA, the likely ones first.

    Returns:
        The first file that verifies the certificate, or None if no file does.
    """
    named = os.environ.get("SSL_CERT_FILE", "")
    candidates = [named] if named else [""]
    for file in (*candidates, *files):
        with contextlib.suppress(OSError):  # also a file that is missing, and `ssl.SSLError`
            context = ssl.create_default_context(cafile=file or None)
            context.check_hostname = False  # another name than that of clients is used here
            host = urlsplit(url)
            address = (host.hostname or "", host.port or 443)
            with (
                socket.create_connection(address, _CONNECT_S) as plain,
                context.wrap_socket(plain),
            ):
                return file
    return None
