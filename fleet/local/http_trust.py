"""TLS settings of commands that connect to a router by HTTPS."""

import ssl


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
