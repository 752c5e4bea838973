"""An emulated worker whose answers have the shape that was asked for.

It has no model: it calls the first tool that it is offered, until it sees a result; it writes the
shortest text that it finds in a grammar; else it says a sentence. What a client makes of an answer
then depends on the router alone.
"""

import asyncio
import struct

import numpy as np

from baton.text.grammar import GrammarCompiler
from router.served_model import ServedModel
from tests.router.emulated_worker import EmulatedWorker, Job, Script

SENTENCE = "Paris is the capital of France."
_MOST_TOKENS = 400
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OFFERED, _RESULT = "You can call these functions", "<tool_response>"
_OUTSIDE = ("}", "]", ",", '"', "{", "[", ":", "1", "true", "null")
_INSIDE = ('"', "a", "1", "-", ":", "@", ".")


class ShapedWorker(EmulatedWorker):
    """The worker.

    Args:
        worker_id: Such as ``decode-0``.
        model: For its vocabulary and its end token.
    """

    def __init__(self, worker_id: str, model: ServedModel) -> None:
        end = model.artifact.config.eos_token_ids[0]
        super().__init__(worker_id, "decode", Script(step_s=0.002, stop_token=end))
        self._tokenizer = model.tokenizer
        self._grammars = GrammarCompiler(model.vocabulary())
        self._texts = [model.tokenizer.token_text(i) for i in range(model.vocab_size)]
        self._ids = {text: i for i, text in reversed(list(enumerate(self._texts)))}

    async def _generate(self, job: Job) -> None:
        sampling = job.submission.sampling
        answer = await asyncio.to_thread(self._answer, job)
        whole = len(answer) < sampling.max_tokens
        answer = answer[: sampling.max_tokens]
        job.tokens = {choice: [] for choice in range(sampling.n)}
        for index, token in enumerate(answer):
            reason = "" if index < len(answer) - 1 else "stop" if whole else "length"
            for choice in range(sampling.n):
                if choice in job.ended_choices:
                    continue
                job.tokens[choice].append(token)
                job.finish[choice] = reason
                self._send_run(job, choice, index, [token], reason)
            await asyncio.sleep(self.script.step_s)

    def _answer(self, job: Job) -> list[int]:
        submission = job.submission
        count = len(submission.prompt_tokens) // 4
        ids = struct.unpack(f"<{count}I", submission.prompt_tokens)
        prompt = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        last_turn = prompt.rpartition("<|im_start|>user")[2]
        calls = _OFFERED in prompt and _RESULT not in last_turn
        grammar = submission.sampling.grammar
        if not grammar:
            return self._tokenizer.encode(SENTENCE, add_special_tokens=False)
        return self._within(grammar, _OPEN if calls else "")

    def _within(self, grammar: str, begin: str) -> list[int]:
        """A short text that the grammar allows, from ``begin`` on if it may begin so."""
        matcher, answer, text = self._grammars.compile(grammar), [], ""
        if begin:
            answer = self._tokenizer.encode(begin, add_special_tokens=False)
            if matcher.try_consume_tokens(answer) == len(answer):
                text = begin
            else:
                matcher.reset()
                answer = []
        elif matcher.is_accepting():  # free text is allowed
            return self._tokenizer.encode(SENTENCE, add_special_tokens=False)
        while len(answer) < _MOST_TOKENS:
            if matcher.is_stopped() or text.endswith(_CLOSE):  # one call is enough
                break
            if matcher.is_accepting() and text != begin:
                break
            token = self._next(matcher.compute_bitmask(), inside=text.count('"') % 2 == 1)
            matcher.consume_token(token)
            answer.append(token)
            text += self._texts[token]
        return answer

    def _next(self, mask: bytes, *, inside: bool) -> int:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, "u1"), bitorder="little"))
        may = set(allowed.tolist())
        for text in _INSIDE if inside else _OUTSIDE:
            if (token := self._ids.get(text, -1)) in may:
                return token
        spelled = [
            token for token in may if token < len(self._texts) and self._texts[token].strip()
        ]
        return max(spelled or may, key=lambda token: (len(self._texts[token]), -token))
