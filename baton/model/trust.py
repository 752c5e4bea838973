"""Rules about the files of a model: licence, digest, and signature by OpenSSF Model Signing.

The package ``model-signing`` is optional (``pip install baton[signing]``).
"""

from baton.model.artifact import ModelArtifact, ModelError
from baton.types.trust import TrustRules

_SHOWN = 200


def check_trust(artifact: ModelArtifact, rules: TrustRules) -> None:
    """Check a model against rules. Reads all its files if it must have a signature.

    Raises:
        ModelError: A rule is not met; the message names the rule and what the model has.
    """
    source = artifact.source
    if rules.licences and artifact.license not in rules.licences:
        has = f"licence {artifact.license!r}" if artifact.license else "no licence"
        raise ModelError(f"{source}: has {has}; gates.licences allows {', '.join(rules.licences)}")
    wanted = rules.weights_digest.lower()
    if wanted and not (digest := artifact.weights_digest.hex()).startswith(wanted):
        raise ModelError(
            f"{source}: the digest of the weights is {digest}; "
            f"gates.weights_digest is {rules.weights_digest}"
        )
    if rules.verify_key:
        _check_signature(artifact, rules)


def _check_signature(artifact: ModelArtifact, rules: TrustRules) -> None:
    if artifact.format == "gguf" and len(artifact.weight_files) > 1:
        raise ModelError(
            f"{artifact.source}: gates.verify_key checks no split files (merge: llama-gguf-split)"
        )
    try:
        from model_signing import verifying
    except ImportError as error:
        raise ModelError(f"gates.verify_key needs `pip install baton[signing]`: {error}") from error
    try:
        verifying.Config().use_elliptic_key_verifier(public_key=rules.verify_key).verify(
            artifact.path, rules.signature
        )
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:_SHOWN]
        raise ModelError(f"{artifact.source}: the signature is not valid ({why})") from error
