"""Secrets on their way through Ray, which keeps the arguments of actors, in Redis if it is told to.

They are sealed with Ray's own token, which every node of the cluster has and which opens all of it
anyhow. Whoever only reads Ray's store, or what it sends, sees none of them.
"""

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.config.secrets import SecretError

SECRET_FIELDS = ("redis_url", "fleet_token")
_MARK = "sealed:"


def seal(text: str) -> str:
    """A text that only who has Ray's token can read; as it is where Ray has none."""
    token = ray_token()
    if not (text and token):
        return text
    from cryptography.fernet import Fernet  # takes its time to import, and loopback needs it not

    return _MARK + Fernet(_key(token)).encrypt(text.encode()).decode()


def unseal(text: str) -> str:
    """What was sealed; a text that was not, as it is.

    Raises:
        SecretError: This node's Ray token is another one.
    """
    if not text.startswith(_MARK):
        return text
    from cryptography.fernet import Fernet, InvalidToken

    try:
        return Fernet(_key(ray_token())).decrypt(text.removeprefix(_MARK).encode()).decode()
    except InvalidToken as error:
        raise SecretError(
            "the settings of a worker were sealed with another Ray token than this node has: the "
            "file ~/.ray/auth_token, or RAY_AUTH_TOKEN_PATH, must be the same on all nodes"
        ) from error


def unsealed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a worker with their secrets in the open."""
    return {
        name: unseal(value) if name in SECRET_FIELDS else value for name, value in settings.items()
    }


def ray_token() -> str:
    """Ray's token, from where Ray takes it; empty where there is none."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _key(token: str) -> bytes:
    digest = hashlib.blake2b(token.encode(), digest_size=32, person=b"baton sealing")
    return base64.urlsafe_b64encode(digest.digest())
