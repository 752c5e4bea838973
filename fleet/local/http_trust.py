"""Whom commands believe that speak to a router by HTTPS."""

import ssl


def trusted(certificate: str = "") -> ssl.SSLContext:
    """What a client accepts.

    Args:
        certificate: Of a router on this host: exactly this one, by whatever name. Without, those
            that this machine's authorities signed, or the ones in the file that ``SSL_CERT_FILE``
            names (``baton --cacert FILE``).

    Raises:
        OSError: The file cannot be read, or is no certificate.
    """
    if not certificate:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context
