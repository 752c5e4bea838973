"""Settings, secrets and policies of a router's process that all its lanes use."""

import os
from dataclasses import dataclass, field
from typing import Self

from baton.config.fleet_file import FleetConfig
from baton.tenants.tenants_file import TenantsFile
from baton.wire.fleet_token import FleetToken
from baton.wire.tls import FleetTls
from router.sessions.prompts import SessionPrompts
from router.settings import ProcessSettings
from router.tenants.policies import TenantPolicies


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCore:
    """Part of a process that its lanes use. Secrets and policies follow changes of their files.

    Attributes:
        fleet_token: Secret that routers and workers of the fleet share.
        tls: Certificates of routers and workers; None: plain text.
        policies: Policies and deletions of tenants.
        session_prompts: Latest prompts of clients' sessions.
    """

    settings: ProcessSettings = field(default_factory=ProcessSettings)
    fleet_token: FleetToken = field(default_factory=FleetToken)
    tls: FleetTls | None = None
    policies: TenantPolicies = field(default_factory=TenantPolicies)
    session_prompts: SessionPrompts = field(default_factory=SessionPrompts)

    @classmethod
    def of(cls, config: FleetConfig, *, port: int | None = None) -> Self:
        """Return the core of a process of the fleet that ``config`` describes.

        ``BATON_FLEET_TOKEN`` is the token of the fleet, and ``BATON_FLEET_TOKEN_FILE`` its file.

        Raises:
            SecretError, CertificateError: A file cannot be used.
        """
        file = config.pools.token_file or os.environ.get("BATON_FLEET_TOKEN_FILE", "")
        tls_files = config.tls_files
        return cls(
            settings=ProcessSettings.of(config, port=port),
            fleet_token=FleetToken.of(file, os.environ.get("BATON_FLEET_TOKEN", "")),
            tls=FleetTls(tls_files) if tls_files is not None else None,
            policies=TenantPolicies(TenantsFile.beside(config.clients.api_keys_file)),
        )
