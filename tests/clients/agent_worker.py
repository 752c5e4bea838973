"""An emulated worker with scripted answers, so that an agent certainly calls tools.

A prompt names its task (``TASK-1``). After it come as many results as calls were made; the next
answer is the step with this number. The last answer repeats a word of the last result, which shows
that the agent sent it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.served_model import ServedModel
from tests.clients.shaped_worker import SENTENCE, ShapedWorker
from tests.router.emulated_worker import Job, Script

_TASK = re.compile(r"TASK-\d+")
_WORD = re.compile(r"word-[0-9a-f]+")
_RESULT = "<tool_response>"


@dataclass(frozen=True)
class Call:
    """One call of a tool that the agent offers."""

    name: str
    arguments: Mapping[str, object]

    def text(self) -> str:
        """The call as a model without a tool format of its own writes it."""
        arguments = json.dumps(self.arguments)
        return (
            f'<tool_call>{{"name": {json.dumps(self.name)}, "arguments": {arguments}}}</tool_call>'
        )


@dataclass
class Steps:
    """Calls by task, and what came of them."""

    by_task: Mapping[str, Sequence[Call]]
    made: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # calls that the grammar does not allow
    cancelled: int = 0


class AgentWorker(ShapedWorker):
    """The worker; ``step_s`` is the time of a token."""

    def __init__(self, model: ServedModel, steps: Steps, step_s: float = 0.002) -> None:
        super().__init__("decode-0", model)
        self.plan = steps
        stop = self.script.stop_token
        self.script = Script(step_s=step_s, stop_token=stop, kv_blocks=10_000)

    def _answer(self, job: Job) -> list[int]:
        ids = job.submission.prompt_tokens
        tokens = [int.from_bytes(ids[i : i + 4], "little") for i in range(0, len(ids), 4)]
        prompt = self._tokenizer.decode(tokens, skip_special_tokens=False)
        grammar = job.submission.sampling.grammar
        tasks = list(_TASK.finditer(prompt))
        if not tasks or "<tool_call>" not in grammar:  # a title, or the like
            return super()._answer(job)
        told = prompt[tasks[-1].end() :]
        done = told.count(_RESULT)
        calls = self.plan.by_task[tasks[-1][0]]
        if done < len(calls):
            return self._allowed(calls[done].text(), grammar)
        last = told.rpartition(_RESULT)[2]
        self.plan.results.append(last)
        words = _WORD.findall(last)
        return self._allowed(f"{SENTENCE} {words[-1] if words else 'no word'}", grammar)

    def _allowed(self, text: str, grammar: str) -> list[int]:
        ids = self._tokenizer.encode(text)
        matcher = self._grammars.compile(grammar)
        if matcher.try_consume_tokens(ids) < len(ids):
            self.plan.refused.append(text)
            return self._tokenizer.encode("The grammar does not allow the call.")
        self.plan.made.append(text)
        return ids
