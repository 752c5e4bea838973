"""Messages between a worker's gRPC shell and its step-loop process, and their framing.

The shell sends commands, the engine sends reports, in the frames of ``baton/engine/ipc.py``.

Token ids have one name and type on each side of this border. The shell (and the wire) has them
packed, as ``prompt_token_ids: bytes``, little-endian uint32. The engine has ``prompt: list[int]``
and ``tokens: list[int]``. ``prompt_tokens`` is a count.
"""

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np

from baton.engine.core.sequence import RequestSpec
from baton.engine.ipc import LENGTH, FrameReader
from baton.types import events as ev
from baton.types.errors import InvalidRequestError
from baton.types.geometry import KvGeometry


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Command: queue a request."""

    request_id: str
    prompt_token_ids: bytes  # packed little-endian uint32
    spec: RequestSpec
    sent_ns: int = 0  # when the worker's shell sent it, on the clock of both processes


class Bind(msgspec.Struct, frozen=True, tag=True):
    """Command after the first publication: allocate the reservation's pages."""

    request_id: str
    generation: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Command to decode behind the first tokens: all pages are verified.

    With ``engine_transfer`` the engine first loads the KV by itself.
    """

    request_id: str
    generation: int
    first: tuple[int | None, ...]  # None for a choice that has ended
    engine_transfer: bytes = b""


class ComputeLocally(msgspec.Struct, frozen=True, tag=True):
    """Command: abandon the KV transfer; ``first`` holds tokens sent to the client."""

    request_id: str
    first: tuple[int | None, ...] | None


class PagesDrained(msgspec.Struct, frozen=True, tag=True):
    """Command: writing to the revoked pages has stopped."""

    request_id: str
    generation: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Command: the KV of a finished prompt was pulled."""

    request_id: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Command: end a request, or only these choices."""

    request_id: str
    choices: tuple[int, ...] = ()
    reason: str = ""


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Command: end a prompt for another worker, unless it has begun."""

    request_id: str


class EraseBlocks(msgspec.Struct, frozen=True, tag=True):
    """Command: erase the cached blocks with these tags, and cache none from now on."""

    tags: frozenset[bytes]


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Command: drop all cached blocks, so that the memory of the pool can be given back."""


class ExpandImage(msgspec.Struct, frozen=True, tag=True):
    """Command: report the tokens that stand for an image; only for engines with images."""

    request_id: str
    data: bytes


class StopEngine(msgspec.Struct, frozen=True, tag=True):
    """Command: end the process."""


Command = (
    Submit
    | Bind
    | Commit
    | ComputeLocally
    | PagesDrained
    | Release
    | Cancel
    | Withdraw
    | EraseBlocks
    | Sleep
    | ExpandImage
    | StopEngine
)


def malformed(command: Command, vocab_size: int) -> InvalidRequestError | None:
    """Return the error for a command that would end an engine with this vocabulary, or None."""
    ids: tuple[int | None, ...] = ()
    match command:
        case Submit(prompt_token_ids=prompt, spec=spec):
            if len(prompt) % np.dtype("<u4").itemsize:
                return InvalidRequestError("the prompt is not a list of uint32 token ids")
            if spec.params.n < 1:
                return InvalidRequestError(f"n is {spec.params.n}; it must be at least 1")
            largest = int(np.frombuffer(prompt, "<u4").max(initial=0))
            biased = (token for token, _ in spec.params.logit_bias)
            emitted = (tokens for tokens in spec.emitted if tokens is not None)
            words = chain(spec.params.bad_words, emitted)
            ids = (largest, *spec.params.stop_token_ids, *biased, *chain.from_iterable(words))
        case Commit() | ComputeLocally():
            ids = command.first or ()
    for token in ids:
        if token is not None and not 0 <= token < vocab_size:
            return InvalidRequestError(
                f"token id {token} is outside the model's vocabulary (0 to {vocab_size - 1})"
            )
    return None


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Report of a stage of loading."""

    what: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report that the engine takes requests."""

    pid: int
    geometry: KvGeometry
    numerics_id: str
    weights_digest: bytes
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    threads: int
    load_s: float
    ranks: tuple[int, ...] = ()  # pids of a tensor-parallel replica, the leader's first
    hand_off: str = ""  # how the engine moves KV by itself; empty: it does not
    running: bytes = b""  # server to which the shell talks itself, see baton.engine.vllm.translator


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """Report of a failure that ends the process with a nonzero exit code."""

    message: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Report that the step loop runs, sent when there is no other report."""


class BlocksErased(msgspec.Struct, frozen=True, tag=True):
    """Report that blocks were erased: their number by tier, ``pool`` included; -1: an error."""

    blocks: dict[str, int]


class ImageExpanded(msgspec.Struct, frozen=True, tag=True):
    """Report of a prompt in which the tokens [begin, begin + count) stand for an image."""

    request_id: str
    prompt: tuple[int, ...]
    begin: int
    count: int


class Slept(msgspec.Struct, frozen=True, tag=True):
    """Report that cached blocks were dropped, and of how many blocks still hold data."""

    left: int


class Sick(msgspec.Struct, frozen=True, tag=True):
    """Report that the model produced NaN or Inf."""

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
    | ev.Loaded
    | ev.LoadFailed
    | ImageExpanded
)
"""Reports about one request that has not ended."""

Report = (
    LoadProgress | Ready | Fatal | Alive | Sick | BlocksErased | Slept | ImageExpanded | ev.Event
)


_encoder = msgspec.msgpack.Encoder()


def frame(messages: Sequence[Report | Command]) -> bytes:
    """Return one frame that contains ``messages``."""
    body = _encoder.encode(messages)
    return LENGTH.pack(len(body)) + body


def command_reader() -> FrameReader[Command]:
    """Return the engine's reader of commands."""
    return FrameReader(msgspec.msgpack.Decoder(list[Command]))


def report_reader() -> FrameReader[Report]:
    """Return the shell's reader of reports."""
    return FrameReader(msgspec.msgpack.Decoder(list[Report]))
