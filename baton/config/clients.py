"""Fleet file section on clients: API keys, timeouts, HTTPS, stored responses."""

from collections.abc import Mapping
from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    model_validator,
)

from baton.config.identity import OidcConfig
from baton.config.network import (
    HttpsConfig,
    MonitoringConfig,
    plain_text_problem,
    require_absolute,
)
from baton.config.section import Section

ANY_ORIGIN = "*"
KEYS_IN_REDIS = "redis"

Origin = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*?#]+)$")]
ServedHost = Annotated[str, StringConstraints(to_lower=True, pattern=r"^[A-Za-z0-9_.-]{1,253}$")]
ImageHost = Annotated[
    str, StringConstraints(to_lower=True, pattern=r"^[A-Za-z0-9_.-]{1,253}(:[0-9]{1,5})?$")
]
Objective = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,253}$")]
Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
_MIB = 1024 * 1024


def _file_or_redis(name: str) -> str:
    return name if name == KEYS_IN_REDIS else require_absolute(name)


def _network(name: str) -> str:
    return str(ip_network(name))


Network = Annotated[str, AfterValidator(_network)]
KeysFile = Annotated[str, AfterValidator(_file_or_redis)]


class SloConfig(Section):
    """Latencies that a good response keeps. Requests that would miss them wait or get 429.

    Attributes:
        ttft_s: Limit of the time to first token beyond twice the time that the prompt alone
            takes on an idle worker.
        itl_s: Limit of the mean ITL of a response.
    """

    ttft_s: Annotated[float, Field(gt=0, le=3600)]
    itl_s: Annotated[float, Field(gt=0, le=60)]


class ImagesConfig(Section):
    """Limits of images in requests, for models that vLLM serves with images.

    Attributes:
        most: Images of a request, those of earlier turns included.
        most_pixels: Pixels of all images of a request together.
        hosts: Hosts from which images are fetched, each HOST or HOST:PORT. Redirects are refused.
    """

    most: Annotated[int, Field(ge=0, le=256)] = 16
    most_pixels: Annotated[int, Field(ge=1024, le=1 << 26)] = 1 << 25
    hosts: Annotated[tuple[ImageHost, ...], Field(strict=False)] = ()


class ApiKeyConfig(Section):
    """Permissions of an API key. In YAML, a tenant's name alone is allowed too.

    Attributes:
        role: An ``operator`` can also use ``/metrics``, ``/fleet`` and every tenant's requests.
            ``metrics`` reads ``/metrics`` and nothing else. ``user`` is an older name of
            ``tenant``.
        adapters: Adapters of the key. ``own`` lets it load and unload LoRA adapters from the
            tenant's folder below ``adapters.folder``, which only its tenant can use.
        min_priority: Lowest (most urgent) ``priority`` that its requests may set.
        log_text: Log the prompts and responses of its requests, redacted by ``logs.redact``.
        slo: Latencies of its requests, in place of the fleet's.
    """

    tenant: Tenant = "default"  # owner of the requests, for fairness and caches
    role: Literal["tenant", "operator", "metrics"] = "tenant"
    adapters: Literal["shared", "own"] = "shared"
    min_priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    log_text: bool = False
    slo: SloConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_means_tenant(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("role") == "user":
            return {**value, "role": "tenant"}
        return {"tenant": value} if isinstance(value, str) else value


class StoredResponsesConfig(Section):
    """Responses that ``/v1/responses`` stores in Redis for later turns.

    Attributes:
        keep_s: Seconds to keep a response after its last use.
        max_response_bytes: Size limit of one response with its request. A larger one is
            returned to the client and not stored.
        max_tenant_bytes: Size limit per tenant; the least recently used responses are removed.
        max_total_bytes: Size limit of all tenants together.
    """

    keep_s: Annotated[float, Field(gt=0, le=366 * 24 * 3600)] = 24 * 3600.0
    max_response_bytes: Annotated[int, Field(ge=1)] = 1024 * 1024
    max_tenant_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * 1024
    max_total_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024


class BatchConfig(Section):
    """Limits of ``/v1/files`` and ``/v1/batches``. Files are in the fleet's state folder.

    Attributes:
        max_file_bytes: Size limit of one uploaded file.
        max_bytes_per_tenant: Size limit of all files of one tenant, results included.
        max_bytes: Size limit of all files.
        at_once: Lines of all batches that run or wait at one time.
        keep_days: Days until a file or a finished batch is deleted.
    """

    max_file_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)] = 100 * _MIB
    max_bytes_per_tenant: Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)] = 1024 * _MIB
    max_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)] = 4096 * _MIB
    at_once: Annotated[int, Field(ge=1, le=4096)] = 8
    keep_days: Annotated[int, Field(ge=1, le=3650)] = 30


class ClientLimitsConfig(Section):
    """Limits for clients: timeouts, connections, origins, HTTPS.

    Attributes:
        header_timeout_s: Seconds from the connection, or the first byte, to the end of the header.
        body_timeout_s: Seconds for the whole body of a request.
        write_timeout_s: Seconds within which a client must read waiting data of a response.
        cors_origins: Origins whose pages may call the router (``https://chat.example.com``);
            ``*`` allows any. Without origins, browsers block such calls.
        hosts: Names of the router in ``Host``, beside its address and local names. Without API
            keys, calls with other names are refused, because a web page could own the name.
        proxies: Addresses and networks of proxies (``10.0.0.0/8``), whose ``X-Forwarded-For`` is
            trusted, and which have no limit of connections per address.
        cors_any_origin_with_keys: Confirms ``*`` in a fleet that has API keys: any page that
            gets hold of a key can then use it.
        strict: Reject unknown request fields. Otherwise they are ignored and named in the
            header ``x-baton-ignored``.
        remove_rotating_texts: Leave texts out of system prompts that differ in each call, such as
            Claude Code's ``x-anthropic-billing-header``. Otherwise nothing behind them is cached.
        pinned_share: Part of a worker's KV blocks that each tenant's clients may keep cached
            longer by ``prompt_cache_retention`` and ``cache_control``; 0: these have no effect.
        tls: HTTPS certificate of the routers. Without it, they use plain text.
        objectives: ``priority`` of requests that name an objective in llm-d's header
            ``x-llm-d-inference-objective``, but not below their key's ``min_priority``.
        insecure: Confirms plain text to other hosts, such as behind a proxy that terminates
            TLS.
        api_keys_file: File with API keys, in place of ``api_keys``. It is read again when it
            changes. ``redis``: requests need a key of ``baton keys``, or one of ``api_keys``.
        oidc: Issuer whose JWTs are bearer tokens, beside API keys if there are any.
    """

    header_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    body_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    write_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    cors_origins: Annotated[tuple[Origin, ...], Field(strict=False)] = ()
    hosts: Annotated[tuple[ServedHost, ...], Field(strict=False)] = ()
    proxies: Annotated[tuple[Network, ...], Field(strict=False)] = ()
    cors_any_origin_with_keys: bool = False
    images: ImagesConfig = ImagesConfig()  # limits of images in requests
    batch: BatchConfig = BatchConfig()  # files and batches that clients upload
    strict: bool = False
    remove_rotating_texts: bool = True
    pinned_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    stored_responses: StoredResponsesConfig = StoredResponsesConfig()
    tls: HttpsConfig | None = None
    monitoring: MonitoringConfig | None = None  # a port for scrapes and health, without a key
    insecure: bool = False
    objectives: Mapping[Objective, Annotated[int, Field(ge=-(2**31), lt=2**31)]] = {}
    api_keys_file: KeysFile | None = None
    oidc: OidcConfig | None = None

    @property
    def certificate(self) -> str:
        """Path of the routers' certificate; empty for plain HTTP."""
        return self.tls.certificate if self.tls is not None else ""

    @property
    def scheme(self) -> str:
        """URL scheme of the routers."""
        return "https" if self.tls is not None else "http"

    def plain_text_problem(self, host: str) -> str:
        """Return why a router may not listen on ``host``, or "" if it may."""
        return plain_text_problem(host, tls=self.tls is not None, insecure=self.insecure)


def _check_key_sources(clients: ClientLimitsConfig, info: ValidationInfo) -> ClientLimitsConfig:
    """Refuse two sources of keys, and ``*`` with keys: any page could use a key that it got.

    Reads ``api_keys`` of the fleet file, which is validated before.
    """
    inline = info.data.get("api_keys")
    if inline and clients.api_keys_file not in (None, KEYS_IN_REDIS):
        raise ValueError("api_keys_file and `api_keys` exclude each other: remove one of them")
    has_keys = inline or clients.api_keys_file or clients.oidc
    confirmed = clients.cors_any_origin_with_keys
    if ANY_ORIGIN in clients.cors_origins and has_keys and not confirmed:
        raise ValueError(
            "cors_origins has '*' and the fleet has api_keys: any web page could use a key that it "
            "got hold of. Name the origins, or set `cors_any_origin_with_keys: true`"
        )
    return clients


Clients = Annotated[ClientLimitsConfig, AfterValidator(_check_key_sources)]
