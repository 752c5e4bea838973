"""The router's own certificate: read again when its files change, for connections from then on."""

import asyncio
import ssl

from baton.config.network import HttpsConfig
from baton.config.watched_files import WatchedFiles
from baton.wire.tls import check_pair

_LOOK_S = 1.0


class LiveCertificate:
    """A server's TLS context that follows its files.

    Args:
        https: The files.

    Raises:
        CertificateError: They cannot be used.
    """

    def __init__(self, https: HttpsConfig) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._https = https
        self._files = WatchedFiles((https.certificate, https.key), self._load)

    async def follow(self) -> None:
        """Look at the files, for as long as the server runs."""
        while True:
            await asyncio.sleep(_LOOK_S)
            _ = self._files.current

    def _load(self) -> None:
        https = self._https
        check_pair(https.certificate, https.key)  # first: a context keeps half of a bad pair
        self.context.load_cert_chain(https.certificate, https.key)
