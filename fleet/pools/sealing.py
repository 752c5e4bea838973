"""Encryption of secrets on their way through Ray, which stores the arguments of actors.

The key is derived from Ray's own token, which every node has and which gives full access to the
cluster anyway. A reader of Ray's store or traffic alone cannot decrypt the secrets.
"""

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.config.secrets import SecretError
from baton.folders import home_folder

SECRET_FIELDS = ("redis_url", "fleet_token")
_MARK = "sealed:"


def seal(text: str) -> str:
    """Encrypt a text with Ray's token; return it unchanged if Ray has no token."""
    token = ray_token()
    if not (text and token):
        return text
    from cryptography.fernet import Fernet  # slow to import, and not needed on loopback

    return _MARK + Fernet(_key(token)).encrypt(text.encode()).decode()


def unseal(text: str) -> str:
    """Decrypt a sealed text; return any other text unchanged.

    Raises:
        SecretError: This node has another Ray token.
    """
    if not text.startswith(_MARK):
        return text
    from cryptography.fernet import Fernet, InvalidToken

    try:
        return Fernet(_key(ray_token())).decrypt(text.removeprefix(_MARK).encode()).decode()
    except InvalidToken as error:
        raise SecretError(
            "cannot decrypt a worker's settings: this node has another Ray token; "
            "~/.ray/auth_token, or RAY_AUTH_TOKEN_PATH, must have the same one on all nodes"
        ) from error


def unsealed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a worker's settings with decrypted secrets."""
    return {
        name: unseal(value) if name in SECRET_FIELDS else value for name, value in settings.items()
    }


def ray_token() -> str:
    """Return Ray's token from where Ray reads it; empty if there is none."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        file = Path(named) if named else home_folder() / ".ray" / "auth_token"
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _key(token: str) -> bytes:
    digest = hashlib.blake2b(token.encode(), digest_size=32, person=b"baton sealing")
    return base64.urlsafe_b64encode(digest.digest())
