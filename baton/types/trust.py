"""Rules about the files of a model."""

import msgspec


class TrustRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules that a model must meet; empty ones allow everything.

    Attributes:
        licences: Allowed licences, as in the model's record.
        weights_digest: Digest of the weights in hexadecimal, or its first 12 digits or more.
        signature: Path of the detached signature.
        verify_key: Path of the public key of the signature, in PEM.
    """

    licences: tuple[str, ...] = ()
    weights_digest: str = ""
    signature: str = ""
    verify_key: str = ""
