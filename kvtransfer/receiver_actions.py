"""Actions of the receiving state machine, which its shell performs."""

from dataclasses import dataclass

from kvtransfer.kv_slice import KvSlice


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Start (or resume) the stream to the prefill worker for this reservation."""

    generation: int
    skip_blocks: int


@dataclass(frozen=True, slots=True)
class BindPages:
    """Ask the engine for pages."""

    generation: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Request these frames from the peer; ``epoch`` separates them from an earlier peer's."""

    kv_slices: tuple[KvSlice, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class CommitKv:
    """Every byte is verified and in its page: decode."""

    generation: int


@dataclass(frozen=True, slots=True)
class LoadKv:
    """Send the engine the peer's parameters, with which it loads the KV by itself."""

    generation: int


@dataclass(frozen=True, slots=True)
class KvLoaded:
    """Note that the engine has loaded the KV by itself, and decodes."""


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End the stream to the prefill worker; ``release`` = everything arrived."""

    release: bool


@dataclass(frozen=True, slots=True)
class AskForPeer:
    """Request another prefill worker; ``peer_died`` counts towards the poison request limit.

    ``again``: a repetition, because the first message or its answer may have been lost.
    """

    reason: str
    peer_died: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing writes into the pages of this revoked generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Compute the prompt on this worker; nothing writes into the pages any more."""


Action = (
    OpenStream
    | BindPages
    | Pull
    | CommitKv
    | LoadKv
    | KvLoaded
    | CloseStream
    | AskForPeer
    | Drained
    | TakeOver
)
