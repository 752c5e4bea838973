"""Certificate of the router, which is reloaded for new connections when its files change."""

import asyncio
import ssl

from baton.config.network import HttpsConfig
from baton.config.watched_files import WatchedFiles
from baton.wire.tls import check_pair

_LOOK_S = 1.0


class LiveCertificate:
    """TLS context of a server that is updated when its files change.

    Raises:
        CertificateError: The files cannot be used.
    """

    def __init__(self, https: HttpsConfig) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._https = https
        self._files = WatchedFiles((https.certificate, https.key), self._load)

    async def follow(self) -> None:
        """Watch the files until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            _ = self._files.current

    def _load(self) -> None:
        https = self._https
        check_pair(
            https.certificate, https.key
        )  # before loading: a context would keep half of an invalid pair
        self.context.load_cert_chain(https.certificate, https.key)
