"""Everything that one worker needs to know, and what it may listen on."""

import msgspec

from baton.config.network import TlsFiles, is_loopback
from baton.engine.settings import EngineSettings
from baton.registry.types import Role
from baton.telemetry.logs import LogFormat
from baton.types.errors import InternalError
from baton.wire.fleet_token import FleetToken
from baton.wire.tls import FleetTls

CANARY_S = 10.0


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one worker needs to know."""

    worker_id: str
    role: Role
    epoch: int
    fleet: str
    served_model_name: str
    engine: EngineSettings
    redis_url: str
    fleet_token: str = ""
    fleet_token_file: str = ""  # on this host; read again when it changes
    tls: TlsFiles | None = None
    insecure: bool = False  # plain text to other hosts is meant
    unsigned_pulls: bool = False  # KV is handed to who shows no capability, too
    int8_chunks: bool = True  # KV may travel as int8 where that pays, never in ``exact``
    receive_cpu_share: float = 0.025  # of a core, for KV that comes in while answers are written
    host: str = "127.0.0.1"
    log_dir: str = ""
    log_format: LogFormat = "text"
    ports: str = ""  # FIRST-LAST that it may listen on; empty: the kernel chooses
    fault_injection: str = ""  # damage frames on purpose, see kvtransfer.fault_injection
    transports: tuple[str, ...] = ()  # by which its KV may be had besides gRPC; none named: all
    ranks_apart: bool = False  # ranks 1 and up are no children: whoever starts this starts them
    rank_addresses: tuple[str, ...] = ()  # of these ranks (``fleet.rank``)
    canary_s: float = CANARY_S

    def token(self) -> FleetToken:
        """What this worker shows to others and asks of them.

        Raises:
            SecretError: The file that holds it cannot be used.
        """
        return FleetToken.of(self.fleet_token_file, self.fleet_token)

    def credentials(self) -> FleetTls | None:
        """For its port and its channels; None is plain text.

        Raises:
            CertificateError: The files cannot be used.
            InternalError: Plain text would leave this host, and nobody has said that it may, or a
                transport that knows nothing else is asked for.
        """
        if self.tls is not None:
            if plain := {"pair", "tcp"} & set(self.transports):
                raise InternalError(
                    f"transports: {min(plain)} sends KV in plain text, and this fleet has TLS: "
                    "leave it out, or `pools: {tls: …}`"
                )
            if self.rank_addresses:
                raise InternalError(
                    "rank_addresses: orders and tensors go to ranks on other hosts in plain text, "
                    "and this fleet has TLS"
                )
            return FleetTls(self.tls)
        if not (self.insecure or is_loopback(self.host)):
            raise InternalError(
                f"host = {self.host}: workers would send prompts, KV and the fleet's token to "
                "other hosts in plain text. Name certificates, `pools: {tls: {certificate: FILE, "
                "key: FILE, ca: FILE}}` (`baton certs DIR` makes them for trials), or say `pools: "
                "{insecure: true}`"
            )
        return None
