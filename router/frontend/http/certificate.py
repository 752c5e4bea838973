"""Certificate of the router, which is reloaded for new connections when its files change."""

import asyncio
import ssl

from baton.config.network import HttpsConfig
from baton.config.watched_files import WatchedFiles
from baton.wire.tls import check_pair, use_newest

_LOOK_S = 1.0


class LiveCertificate:
    """TLS context of a server, whose new connections use the newest files.

    Raises:
        CertificateError: The files cannot be used.
    """

    def __init__(self, https: HttpsConfig) -> None:
        self._https = https
        self._files = WatchedFiles((https.certificate, https.key), self._load)
        self._newest = self.context = self._files.current
        use_newest(self.context, lambda: self._newest)

    async def follow(self) -> None:
        """Watch the files until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Load the files if they have changed."""
        self._newest = self._files.current

    def _load(self) -> ssl.SSLContext:
        https = self._https
        check_pair(https.certificate, https.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(https.certificate, https.key)
        return context
