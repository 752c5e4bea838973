"""Certificate authorities by which servers are verified, read again when their files change."""

import os
import ssl
from functools import cache

from baton.config.watched_files import WatchedFiles


def trusted_context() -> ssl.SSLContext:
    """Return the context of this host's CAs, and of those in ``SSL_CERT_FILE``, as they are now.

    Raises:
        OSError: That file cannot be used.
    """
    return _trusted_files(os.environ.get("SSL_CERT_FILE", "")).current


@cache
def _trusted_files(named: str) -> WatchedFiles[ssl.SSLContext]:
    paths = ssl.get_default_verify_paths()
    folders = os.environ.get("SSL_CERT_DIR", paths.openssl_capath).split(os.pathsep)
    return WatchedFiles((named or paths.openssl_cafile, *folders), lambda: _read_trusted(named))


def _read_trusted(named: str) -> ssl.SSLContext:
    context = ssl.create_default_context()  # which ignores a file without certificates
    if named:
        try:
            context.load_verify_locations(named)
        except OSError as error:
            raise OSError(f"SSL_CERT_FILE={named} cannot be used: {error.strerror}") from None
    return context
