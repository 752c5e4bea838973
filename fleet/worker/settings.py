"""Settings of one worker, with the checks of its token and of encryption."""

import msgspec

from baton.config.network import TlsFiles, is_loopback
from baton.engine.settings import EngineSettings
from baton.registry.types import Role
from baton.telemetry.logs import LogFormat
from baton.types.errors import InternalError
from baton.types.trust import TrustRules
from baton.wire.fleet_token import FleetToken
from baton.wire.tls import FleetTls

PROBE_S = 10.0


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one worker process."""

    worker_id: str
    role: Role
    epoch: int
    turn: int = 0  # number of the turn that gave it its role
    fleet: str
    served_model_name: str
    engine: EngineSettings
    redis_url: str
    fleet_token: str = ""
    fleet_token_file: str = ""  # on this host; reread when it changes
    tls: TlsFiles | None = None
    insecure: bool = False  # allow plain text to other hosts
    unsigned_pulls: bool = False  # also accept pulls without a capability
    int8_chunks: bool = True  # allow int8 KV transfers where faster, never in ``exact``
    receive_cpu_share: float = 0.025  # of a core, to receive KV while decoding
    host: str = "127.0.0.1"
    log_dir: str = ""
    log_format: LogFormat = "text"
    ports: str = ""  # allowed range FIRST-LAST; empty: the kernel chooses
    transports: tuple[str, ...] = ()  # offered besides gRPC; empty: all
    label: str = ""  # name of the attached server; empty: the worker has its own engine
    server: str = ""  # its address:port, for gateways
    unseen_block_tokens: int = 0  # tokens of its blocks, if it caches and sends no KV events
    probe_s: float = PROBE_S
    idle_sleep_s: float = 0.0  # time without requests before the worker sleeps; 0: never
    trust: TrustRules = TrustRules()  # checked before the engine loads the model

    def token(self) -> FleetToken:
        """Return the fleet token, which this worker sends and requires."""
        return FleetToken.of(self.fleet_token_file, self.fleet_token)

    def credentials(self) -> FleetTls | None:
        """Return the TLS credentials of the port and the channels; None: plain text.

        Raises:
            CertificateError: The files cannot be used.
            InternalError: Plain text to other hosts is not allowed, or a setting needs plain text
                although the fleet has TLS.
        """
        if self.tls is not None:
            if plain := {"pair", "tcp"} & set(self.transports):
                raise InternalError(
                    f"transports: {min(plain)} sends KV in plain text, but this fleet has TLS: "
                    "remove the transport, or `pools: {tls: …}`"
                )
            return FleetTls(self.tls)
        if not (self.insecure or is_loopback(self.host)):
            raise InternalError(
                f"host = {self.host}: workers would send prompts, KV and the fleet token to other "
                "hosts in plain text. Set `pools: {tls: {certificate: FILE, key: FILE, ca: FILE}}` "
                "(`baton certs DIR` makes them for trials), or allow it with `pools: {insecure: "
                "true}`"
            )
        return None
