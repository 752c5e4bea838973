"""Times of the router's work on a chat, part by part, with its own functions."""

import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from batonpb.decode_pb2 import Submission

from baton.engine.block_names import packed_names
from baton.types.params import SamplingParams
from baton.wire.tokens import pack_tokens
from benchmarks.placement import fleet, placer_of
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.parse import parse
from router.frontend.api.bodies.rendering import rendering_of
from router.frontend.api.structured_output import requested_grammar
from router.frontend.api.tool_use.offered import messages_of, offered
from router.request import GenerationRequest
from router.served_model import ServedModel

_SEED = bytes(16)


class Phases(NamedTuple):
    """Milliseconds of the parts, and the size of the prompt.

    Attributes:
        body: Parsing and checking the JSON.
        grammar: Making the source of the response's grammar; 0 for a free response. The router
            keeps it for a list of tools, so only the first request with it makes it.
        template: Rendering the text of the prompt.
        tokenizer: Encoding its token ids.
        hashes: Computing its block hashes.
        placement: Choosing among four workers, without the hashes.
        submission: Encoding the message to the worker.
    """

    body: float
    grammar: float
    template: float
    tokenizer: float
    hashes: float
    placement: float
    submission: float
    tokens: int


class _Watch:
    def __init__(self) -> None:
        self.taken: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.taken[name] = 1e3 * (time.perf_counter() - began_s)


def phases_of(raw: bytes, model: ServedModel) -> Phases:
    """Do once, in this process, what the router does with a chat."""
    watch = _Watch()
    with watch.part("body"):
        body = parse(ChatBody, raw, model=model.names[0])
    with watch.part("grammar"):
        requested = requested_grammar(body, model)
    with watch.part("template"):
        tools = offered(body.tools, body.tool_choice)
        text = model.render_chat(
            messages_of(body.messages), tools, rendering_of(body, model.template)
        )
    with watch.part("tokenizer"):
        prompt = model.encode_rendered(text)
    with watch.part("hashes"):
        packed_names(_SEED, pack_tokens(prompt))
    request = GenerationRequest(
        request_id=secrets.token_hex(8),
        prompt=prompt,
        sampling=SamplingParams(max_tokens=64),
        arrived_ns=0,
        deadline_ns=10**18,
    )
    placer = placer_of(fleet(2, 2, random.Random(1)))
    with watch.part("placement"):
        placer.place(request)
    watch.taken["placement"] = max(watch.taken["placement"] - watch.taken["hashes"], 0.0)
    with watch.part("submission"):
        source = requested.source if requested is not None else ""
        submission = Submission(request_id="bench", prompt_tokens=pack_tokens(prompt))
        submission.sampling.grammar = source
        submission.SerializeToString()
    return Phases(**watch.taken, tokens=len(prompt))


def medians(measure: Callable[[], Phases], rounds: int) -> Phases:
    """Return the medians of all parts over some rounds."""
    columns = zip(*(measure() for _ in range(rounds)), strict=True)
    return Phases(*(sorted(values)[rounds // 2] for values in columns))
