"""Test of a running vLLM of a version that Baton was not tested with: what workers rely on.

    first      a prompt: tokens with log-probabilities, none of the prompt cached
    again      the same prompt: its whole blocks are cached
    apart      the same prompt with another cache salt: nothing is cached
    events     the KV events name the blocks of the prompt as Baton does
    loaded     with ``hand_off: baton``: its blocks in pages, and from there into other blocks

Each response must have the same first token, but for near ties.
"""

import asyncio
from collections.abc import Callable

import numpy as np

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.remote.http import HttpOrigin
from baton.engine.remote.live_request import Parameters, Saved
from baton.engine.vllm import protocol
from baton.engine.vllm.events_client import EventPrefixes
from baton.engine.vllm.facts import VllmFacts
from baton.engine.vllm.hand_off_baton import SaveReports
from baton.engine.vllm.server import GENERATIONS, SAVES
from baton.engine.vllm.versions import TESTED
from baton.telemetry.tasks import BackgroundTasks
from baton.types.block_hashes import block_hashes
from baton.types.errors import BatonError, InternalError
from baton.types.geometry import BLOCK_TOKENS
from baton.types.params import SampledToken, SamplingParams

_NAME = "selftest"
_BLOCKS = 3  # of vLLM, of the prompt
_TIE = 0.5  # of log-probabilities
_LIMIT_S = 120.0  # on a slow CPU


async def check_untested(
    origin: HttpOrigin,
    facts: VllmFacts,
    read_events: Callable[[Callable[..., None]], EventPrefixes],
    folder: str,
    vocab_size: int,
) -> None:
    """Test the running server; ``read_events`` makes a reader that calls back after changes.

    Raises:
        InternalError: It does not do what workers rely on.
    """
    test = _Test(origin, facts, vocab_size)
    tasks = BackgroundTasks("vllm selftest")
    changed = asyncio.Event()
    prefixes = read_events(lambda *_: changed.set())
    step = "responses"
    try:
        async with asyncio.timeout(_LIMIT_S):
            await test.responses()
            step = "KV events"
            for work, name in prefixes.works():
                tasks.spawn(work, name)
            await test.events(prefixes, changed)
            step = "hand_off: baton"
            if facts.hand_off.startswith("baton/"):
                await test.pages(folder)
            await origin.fetch("POST", "/reset_prefix_cache", _LIMIT_S)
    except (BatonError, TimeoutError) as error:
        why = getattr(error, "message", f"nothing within {_LIMIT_S:.0f} s")
        raise InternalError(
            f"vLLM {facts.version} fails in the test of {step}: {why}; Baton was tested with vLLM "
            f"{', '.join(TESTED)}: install it"
        ) from None
    finally:
        await tasks.close()
        prefixes.close()


class _Test:
    def __init__(self, origin: HttpOrigin, facts: VllmFacts, vocab_size: int) -> None:
        self._origin = origin
        self._facts = facts
        self._whole = _BLOCKS * facts.block_tokens
        self._prompt = [(7919 * at + 13) % vocab_size for at in range(self._whole + 1)]
        self._cached = 0  # tokens of a repeated prompt; 0: vLLM caches no prefixes of this model
        self._first: SampledToken | None = None

    async def responses(self) -> None:
        await self._ask("a prompt", b"a" * 16, 0)
        self._cached = await self._ask("its repetition", b"a" * 16)
        await self._ask("the prompt of another tenant", b"b" * 16, 0)

    async def events(self, prefixes: EventPrefixes, changed: asyncio.Event) -> None:
        hashes = block_hashes(b"a" * 16, self._prompt)
        while prefixes.cached_tokens(hashes) < self._cached:
            changed.clear()
            await changed.wait()

    async def pages(self, folder: str) -> None:
        """Let vLLM copy blocks into pages, and from there into blocks of another tenant."""
        pages = list(range(self._whole // BLOCK_TOKENS))
        file = f"{folder}/{GENERATIONS}"
        generations = np.memmap(file, np.int64, "r+", shape=(self._facts.pool_blocks,))
        place = {"first_token": 0, "generation": 1}
        saving = set(range(self._facts.width))
        saved = asyncio.Event()

        def report(_generation: int, part: Saved, rank: int) -> None:
            if part.pages:  # in all layers
                saving.discard(rank)
            if not saving:
                saved.set()

        reports = SaveReports(f"{folder}/{SAVES}", report, lambda *_: None)
        generations[pages] = 1
        try:
            await self._ask("a saved prompt", b"c" * 16, 0, {"save_pages": pages, **place})
            await saved.wait()
            loads = {"load_pages": pages, **place}
            await self._ask("a loaded prompt", b"d" * 16, self._whole, loads)
        finally:
            generations[pages] = 0
            reports.close()

    async def _ask(
        self, name: str, seed: bytes, cached: int | None = None, transfer: Parameters | None = None
    ) -> int:
        """Check the response to the prompt; return the tokens of it that were cached."""
        params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=2, ignore_eos=True)
        spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=seed)
        body = protocol.generate_body(_NAME, self._prompt, spec, 0, (), transfer)
        stream = protocol.ChoiceStream(_NAME, 0, spec, ())
        runs = stream.feed(await self._origin.fetch("POST", protocol.GENERATE, _LIMIT_S, body))
        tokens = [token for run in runs for token in run.tokens]
        if len(tokens) != params.max_tokens or not stream.finished:
            raise InternalError(f"{name}: {len(tokens)} tokens of {params.max_tokens}")
        alone = self._first = self._first or tokens[0]
        scores = {**dict(tokens[0].top), tokens[0].token: tokens[0].logprob}
        score = scores.get(alone.token)
        if score is None or alone.logprob is None or abs(score - alone.logprob) > _TIE:
            raise InternalError(f"{name}: {tokens[0]}, and alone {alone}")
        if stream.cached_tokens is None or cached not in (None, stream.cached_tokens):
            raise InternalError(f"{name}: {stream.cached_tokens} cached tokens, not {cached}")
        return stream.cached_tokens
