"""Messages between a worker's gRPC shell and its step-loop process, and their framing.

The shell sends commands, the engine sends reports; each frame is a 4-byte little-endian length and
a msgpack list of messages. KV never passes here: both processes map the same pool.

Token ids have one name and one type on each side of this border. The shell (and the wire) has them
packed, as ``prompt_token_ids: bytes``, little-endian uint32, and never unpacks them to submit; the
engine has them as ``prompt: list[int]`` and ``tokens: list[int]``. ``prompt_tokens`` is a count.
"""

from collections.abc import Sequence

import msgspec

from baton.engine.core.sequence import RequestSpec
from baton.engine.ipc import LENGTH, FrameReader
from baton.types import events as ev
from baton.types.geometry import KvGeometry


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Queue a request."""

    request_id: str
    prompt_token_ids: bytes  # packed little-endian uint32
    spec: RequestSpec


class Bind(msgspec.Struct, frozen=True, tag=True):
    """The first publication came: turn the reservation into pages."""

    request_id: str
    generation: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """All pages are verified: decode behind the first tokens (None = that choice has ended)."""

    request_id: str
    generation: int
    first: tuple[int | None, ...]


class ComputeLocally(msgspec.Struct, frozen=True, tag=True):
    """Give the hand-off up; ``first`` are tokens that are facts already."""

    request_id: str
    first: tuple[int | None, ...] | None


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Writing into the revoked pages has stopped."""

    request_id: str
    generation: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """The taker holds the KV of a finished prompt."""

    request_id: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request, or only these choices."""

    request_id: str
    choices: tuple[int, ...] = ()
    reason: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


Command = Submit | Bind | Commit | ComputeLocally | Drained | Release | Cancel | Stop


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Loading goes on."""

    what: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine takes requests."""

    pid: int
    geometry: KvGeometry
    numerics_id: str
    weights_digest: bytes
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    threads: int
    load_s: float
    ranks: tuple[int, ...] = ()  # pids of a tensor-parallel replica, the leader's first


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on; its exit code is not 0."""

    message: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The step loop runs; said when it has said nothing else for a while."""


class Sick(msgspec.Struct, frozen=True, tag=True):
    """The model produced NaN or Inf."""

    message: str
    failures: int


RequestReport = (
    ev.Tokens
    | ev.PromptOutputsReady
    | ev.Admitted
    | ev.Published
    | ev.PromptDone
    | ev.Reserved
    | ev.Bound
    | ev.Revoked
)
"""Of one request that has not ended."""

Report = (
    Progress
    | Ready
    | Fatal
    | Alive
    | Sick
    | RequestReport
    | ev.Ended
    | ev.CacheChanged
    | ev.AdapterChanged
    | ev.StepDone
)


_encoder = msgspec.msgpack.Encoder()


def frame(messages: Sequence[Report | Command]) -> bytes:
    """One frame that holds ``messages``."""
    body = _encoder.encode(messages)
    return LENGTH.pack(len(body)) + body


def command_reader() -> FrameReader[Command]:
    """For the engine's side."""
    return FrameReader(msgspec.msgpack.Decoder(list[Command]))


def report_reader() -> FrameReader[Report]:
    """For the shell's side."""
    return FrameReader(msgspec.msgpack.Decoder(list[Report]))
