"""Draft tokens whose quality the test chooses, at no cost, so that they are always made."""

import random
from collections.abc import Mapping, Sequence

from baton.engine.core.sequence import TokenSequence
from baton.engine.core.speculative.proposers import DraftCandidate, Proposal, Speculation, StepCost


class FreeDraftTokens(StepCost):
    """Draft tokens cost nothing."""

    def share(self, decodes: int) -> float:
        return 0.0

    def needs_plain_step(self, decodes: int) -> bool:
        return False


class Oracle:
    """Knows the answers to prompts and tells the truth for ``honesty`` of the tokens.

    Args:
        answers: (prompt, choice) -> the answer.
        honesty: Probability that a draft token is right.
    """

    untimed = False

    def __init__(
        self, answers: Mapping[tuple[tuple[int, ...], int], Sequence[int]], honesty: float = 0.7
    ) -> None:
        self.answers = answers
        self.honesty = honesty
        self.random = random.Random(1)

    def propose(self, candidates: Sequence[DraftCandidate], budget_tokens: int) -> list[Proposal]:
        return [self._one(candidate) for candidate in candidates]

    def retain(self, sequence_ids: Mapping[int, TokenSequence]) -> None:
        pass

    def _one(self, candidate: DraftCandidate) -> Proposal:
        sequence = candidate.sequence
        answer = self.answers.get((tuple(sequence.request.prompt), sequence.choice), ())
        truth = answer[sequence.generated :][: candidate.allowed(0)]
        return Proposal([t if self.random.random() < self.honesty else t ^ 1 for t in truth])


def oracle(
    answers: Mapping[tuple[tuple[int, ...], int], Sequence[int]],
    honesty: float = 0.7,
    most: int = 4,
) -> Speculation:
    return Speculation(Oracle(answers, honesty), most, FreeDraftTokens())
