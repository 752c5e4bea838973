"""TLS settings of commands that connect to a router by HTTPS."""

import ssl


def trusted(certificate: str = "") -> ssl.SSLContext:
    """Return the TLS context of a client.

    Args:
        certificate: File of the only accepted certificate, that of a router on this host; its
            names are not checked. Empty: this machine's CAs, or those in the file that
            ``SSL_CERT_FILE`` names (``baton --cacert FILE``).

    Raises:
        OSError: The file cannot be read, or is not a certificate.
    """
    if not certificate:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context
