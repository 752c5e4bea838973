"""Golden prompts, run at the workers of a model."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from baton.text.answer_check import Match
from baton.types.errors import BatonError, UnavailableError
from baton.types.gates import GoldenPrompt, GoldenRound
from baton.types.params import SamplingParams
from router.process import Process
from router.request import Pinned
from router.routing.requests.readiness import pinned_request, probed, usable_pairs
from router.served_model import ServedModel

_AT_ONCE = 4
_TIMEOUT_S = 10.0
_SCOPE = "golden"  # of their cached prefixes, which no tenant shares


def golden_of(router: Process, model: str) -> tuple[GoldenPrompt, ...]:
    """Return the golden prompts of a model: those of ``baton models gate``, or of the fleet file.

    An adapter has those of ``baton models gate`` only, because its answers are not the model's.

    Raises:
        ModelNotFoundError: The model is not served.
    """
    own = router.routes.table.golden.get(model)
    if own is not None:
        return own
    lane = router.lanes.of(model)
    return lane.settings.golden if model in lane.model.names else ()


class GoldenAnswer(NamedTuple):
    """Answer of one model to a golden prompt: token ids of both, and the answer's text."""

    prompt: Sequence[int]
    tokens: tuple[int, ...]
    text: str


def difference(
    golden: GoldenPrompt, answer: GoldenAnswer, other: GoldenAnswer | None = None
) -> str:
    """Return how the tokens of an answer differ from the right ones; empty if they are right.

    ``other``: answer of the model ``golden.same_as``.
    """
    if other is not None and answer.prompt != other.prompt:
        return f"the prompt has other tokens than for {golden.same_as}"
    right = golden.tokens if other is None else other.tokens
    for index, (token, wanted) in enumerate(zip(answer.tokens, right, strict=False)):
        if token != wanted:
            return f"token {index} is {token} instead of {wanted}"
    if len(answer.tokens) != len(right):
        return f"the answer has {len(answer.tokens)} tokens instead of {len(right)}"
    return ""


class _Checked(NamedTuple):
    """Result of one prompt: the difference, or an error (of the other model if ``is_others``)."""

    difference: str = ""
    error: str = ""
    is_others: bool = False


class GoldenRunner:
    """Runs golden prompts at one router."""

    def __init__(self, router: Process) -> None:
        self._router = router
        self._rounds = 0
        self._known: dict[tuple[str, str, bytes], GoldenAnswer] = {}

    async def run(self, model: str, *, everywhere: bool = False) -> GoldenRound:
        """Run the golden prompts of a model.

        ``everywhere``: whether each prompt runs at each pair of workers. Otherwise each prompt and
        each pair has at least one turn, the pairs change with each round, and a prompt is left out
        if its other model gives no answer.

        Raises:
            ModelNotFoundError: The model is not served.
        """
        prompts = golden_of(self._router, model)
        lane = self._router.lanes.of(model)
        self._rounds += 1
        pairs = usable_pairs(lane.gateway, self._rounds)
        if prompts and not pairs:
            return _round({}, {prompt.name: f"{model} has no ready worker" for prompt in prompts})
        gate = asyncio.Semaphore(_AT_ONCE)
        turns = list(_turns(prompts, pairs, self._rounds, everywhere=everywhere))
        checked = (self._check(model, prompt, pair, gate) for prompt, pair in turns)
        results = await asyncio.gather(*checked)
        wrong: dict[str, str] = {}
        failed: dict[str, str] = {}
        left_out: set[str] = set()
        for (prompt, _), result in zip(turns, results, strict=True):
            if result.difference:
                wrong.setdefault(prompt.name, result.difference)
            if result.error and (everywhere or not result.is_others):
                failed.setdefault(prompt.name, result.error)
            elif result.error:
                left_out.add(prompt.name)
        found_right = {prompt.name for prompt in prompts} - wrong.keys() - failed.keys() - left_out
        self._count(lane.model, model, len(found_right), len(wrong), len(failed))
        return _round(wrong, failed, len(found_right))

    def _count(self, served: ServedModel, model: str, right: int, wrong: int, failed: int) -> None:
        for result, count in (("right", right), ("wrong", wrong), ("failed", failed)):
            self._router.metrics.inc(
                "baton_golden_prompts",
                count,
                model=served.own_name(model),
                version=served.version_of(model),
                result=result,
            )

    async def _check(
        self, model: str, prompt: GoldenPrompt, pair: Pinned, gate: asyncio.Semaphore
    ) -> "_Checked":
        async with gate:
            try:
                other = await self._other(prompt) if prompt.same_as else None
            except BatonError as error:
                return _Checked(error=error.message, is_others=True)
            try:
                answer = await self._answer(model, prompt, pair)
            except BatonError as error:
                return _Checked(error=error.message)
            return _Checked(difference=await self._difference(prompt, answer, other))

    async def _difference(
        self, prompt: GoldenPrompt, answer: GoldenAnswer, other: GoldenAnswer | None
    ) -> str:
        if not prompt.regex and prompt.schema is None:
            return difference(prompt, answer, other)
        schema = "" if prompt.schema is None else json.dumps(prompt.schema)
        match = Match(answer.text, regex=prompt.regex, schema=schema)
        return await self._router.answer_checks.problem(match)

    async def _other(self, prompt: GoldenPrompt) -> GoldenAnswer:
        """Return the answer of the model that a prompt names, which runs once."""
        lane = self._router.lanes.of(prompt.same_as)
        version = lane.model.version_of(prompt.same_as)
        key = (prompt.same_as, version, msgspec.json.encode(prompt))
        if (answer := self._known.get(key)) is None:
            pairs = usable_pairs(lane.gateway, self._rounds)
            if not pairs:
                raise UnavailableError(f"{prompt.same_as} has no ready worker")
            answer = self._known[key] = await self._answer(prompt.same_as, prompt, pairs[0])
        return answer

    async def _answer(self, model: str, prompt: GoldenPrompt, pair: Pinned) -> GoldenAnswer:
        lane = self._router.lanes.of(model)
        served = lane.model
        tokens = (
            served.encode_chat(prompt.messages)
            if prompt.messages
            else served.encode_prompt(prompt.prompt)
        )
        sampling = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
        request = pinned_request("golden", tokens, sampling, pair, _TIMEOUT_S)
        request = replace(request, adapter=served.adapter_of(model), cache_scope=_SCOPE)
        record = (await probed(lane.gateway, request)).record
        if record.error is not None:
            raise record.error
        answer = tuple(record.choices[0].token_ids)
        return GoldenAnswer(request.prompt, answer, served.tokenizer.decode(list(answer)))


def _turns(
    prompts: Sequence[GoldenPrompt], pairs: Sequence[Pinned], round_number: int, *, everywhere: bool
) -> Iterator[tuple[GoldenPrompt, Pinned]]:
    if everywhere:
        yield from ((prompt, pair) for pair in pairs for prompt in prompts)
        return
    for index in range(max(len(prompts), len(pairs)) if prompts else 0):
        yield prompts[index % len(prompts)], pairs[(index + round_number) % len(pairs)]


def _round(wrong: dict[str, str], failed: dict[str, str], right: int = 0) -> GoldenRound:
    at_ms = time.time_ns() // 10**6
    return GoldenRound(at_ms=at_ms, right=right, wrong=wrong, failed=failed)
