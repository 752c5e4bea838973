"""Policies of tenants in ``tenants.yaml``, in the folder of ``clients.api_keys_file``.

    team-a: {weight: 3, rpm: 600, tpm: 400_000, budget: {tokens: 2_000_000_000}}

While the file exists, it is the only source of policies. It is read again when it changes.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from baton.config.clients import KEYS_IN_REDIS
from baton.config.secrets import SecretError, read_text
from baton.config.watched_files import WatchedFiles
from baton.config.yaml_text import YamlTextError, parse_yaml
from baton.tenants.limits import Limits

_NAME = "tenants.yaml"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class TenantsFile:
    """Policies in a file that may appear later, and then stays in use.

    Raises:
        SecretError: The file exists and cannot be used.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._watched: WatchedFiles[Mapping[str, Limits]] | None = None
        self._is_wrong = False  # and has no last good policies
        self.current()

    @classmethod
    def beside(cls, api_keys_file: str | None) -> Self | None:
        """Return the file in the folder of the API keys; None if these are in no file."""
        if api_keys_file in (None, KEYS_IN_REDIS):
            return None
        return cls(Path(api_keys_file).with_name(_NAME))

    def current(self) -> Mapping[str, Limits] | None:
        """Return the policies by tenant; None if the file has not existed until now.

        A file that has become wrong is logged, and its last good policies are returned.

        Raises:
            SecretError: There are no last good policies.
        """
        if self._watched is None:
            if not self.file.exists():
                return None
            self._is_wrong = True
            self._watched = WatchedFiles((self.file,), lambda: read_tenants(self.file))
            self._is_wrong = False
        return self._watched.current

    @property
    def is_used(self) -> bool:
        """Presence of policies from the file."""
        return self._watched is not None

    @property
    def is_stale(self) -> bool:
        """State in which the file is wrong, and earlier policies are in use."""
        return self._is_wrong or (self._watched is not None and self._watched.is_stale)


def read_tenants(file: Path) -> dict[str, Limits]:
    """Return the policies in a file, by tenant.

    Raises:
        SecretError: The file cannot be read, or is not ``tenant: {field: value}`` lines.
    """
    text = read_text(file, "the policies of tenants")
    try:
        data, lines = parse_yaml(text, "a file of tenants", lambda path: path)
    except YamlTextError as error:
        raise SecretError(f"{file}:{error}") from error
    policies = {}
    for tenant, fields in data.items():
        where = f"{file}:{lines.get((tenant,), 1)}: {tenant[:80]}"
        if _TENANT.fullmatch(tenant) is None:
            raise SecretError(
                f"{where}: a tenant's name must be 1 to 64 characters of letters, digits, '_', "
                "'.' and '-'"
            )
        try:
            policies[tenant] = msgspec.convert(fields, Limits)
        except msgspec.ValidationError as error:
            raise SecretError(f"{where}: {error}") from error
    return policies
