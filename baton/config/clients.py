"""What the fleet file says of clients: who holds which key, how long the slow have."""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from baton.config.batch import BatchConfig
from baton.config.network import AbsoluteFile, HttpsConfig, plain_text_problem

ANY_ORIGIN = "*"

Origin = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*?#]+)$")]
Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class ApiKeyConfig(BaseModel):
    """What a key may do. In YAML also a tenant's name alone.

    Attributes:
        role: An ``operator`` also sees ``/metrics``, ``/fleet`` and every tenant's requests.
        adapters: ``own``: it also loads and unloads LoRA adapters, which its tenant alone may use,
            from the tenant's folder below ``adapters.folder``.
        min_priority: The lowest, so most urgent, ``priority`` that its requests may ask for.
        log_text: Prompts and answers of its requests stand in the log, redacted by ``logs.redact``.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    tenant: Tenant = "default"  # owner of the requests, for fairness and caches
    role: Literal["user", "operator"] = "user"
    adapters: Literal["shared", "own"] = "shared"
    min_priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    log_text: bool = False

    @model_validator(mode="before")
    @classmethod
    def _a_name_is_a_tenant(cls, value: object) -> object:
        return {"tenant": value} if isinstance(value, str) else value


class StoredResponsesConfig(BaseModel):
    """What ``/v1/responses`` keeps in Redis for later turns.

    Attributes:
        keep_s: After the last use of a response.
        max_response_bytes: Of one, with what was asked; a larger one is answered and not kept.
        max_tenant_bytes: Of a tenant's; beyond it the least recently used go.
        max_total_bytes: Of everybody's.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    keep_s: Annotated[float, Field(gt=0, le=366 * 24 * 3600)] = 24 * 3600.0
    max_response_bytes: Annotated[int, Field(ge=1)] = 1024 * 1024
    max_tenant_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * 1024
    max_total_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024


class ClientLimitsConfig(BaseModel):
    """What the router bears: slow clients, many of them, from where, and how odd their bodies.

    Attributes:
        cors_origins: Pages of these origins may call the router (``https://chat.example.com``);
            ``*`` is any page. Empty: browsers keep their pages away.
        cors_any_origin_with_keys: Says that ``*`` is meant, in a fleet that has API keys: any
            page that comes by a key can then use it.
        batch: Files and batches that clients leave.
        strict: A field that nobody knows is refused; otherwise it is left aside, and the header
            ``x-baton-ignored`` names it.
        tls: Routers speak HTTPS. Without, plain text.
        insecure: Says that plain text to other hosts is meant, as behind a proxy that does TLS.
        api_keys_file: Instead of ``api_keys``: a file with the same, which is read again when it
            changes.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    header_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    body_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    write_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    cors_origins: tuple[Origin, ...] = ()
    cors_any_origin_with_keys: bool = False
    batch: BatchConfig = BatchConfig()
    strict: bool = False
    stored_responses: StoredResponsesConfig = StoredResponsesConfig()
    tls: HttpsConfig | None = None
    insecure: bool = False
    api_keys_file: AbsoluteFile | None = None

    @property
    def certificate(self) -> str:
        """The routers'; empty where they speak plain HTTP."""
        return self.tls.certificate if self.tls is not None else ""

    @property
    def scheme(self) -> str:
        """Of the routers' URL."""
        return "https" if self.tls is not None else "http"

    def plain_text_problem(self, host: str) -> str:
        """Why a router may not listen there, if it may not; else ""."""
        return plain_text_problem(host, tls=self.tls is not None, insecure=self.insecure)

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _a_list_is_a_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


def _keys_are_meant(clients: ClientLimitsConfig, info: ValidationInfo) -> ClientLimitsConfig:
    """Refuse keys at two places, and ``*`` beside them: any page could use a key that it got.

    Reads ``api_keys`` of the fleet file, where that stands above.
    """
    inline = info.data.get("api_keys")
    if inline and clients.api_keys_file:
        raise ValueError("api_keys_file: the fleet file has `api_keys` too: say one of them")
    meant = clients.cors_any_origin_with_keys
    has_keys = inline or clients.api_keys_file
    if ANY_ORIGIN in clients.cors_origins and has_keys and not meant:
        raise ValueError(
            "cors_origins has '*' and the fleet has api_keys: any web page could use a key that it "
            "got hold of. Name the origins, or say `cors_any_origin_with_keys: true`"
        )
    return clients


Clients = Annotated[ClientLimitsConfig, AfterValidator(_keys_are_meant)]
