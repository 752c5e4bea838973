"""Samples the tokens of each row of a step, on the device or on the host.

The device selects the largest logit, or the largest logit / temperature + noise, of all tokens or
of those that ``top_k``, ``top_p`` and ``min_p`` leave. A row with penalties, log-probabilities or a
grammar has its logits copied to the host, where ``baton/engine/sampling/sample.py`` samples. The
choice depends on the row alone, never on the rest of the step.
"""

# ruff: noqa: N803, N806 - suffixes such as x_TE give shapes

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.engine.core.plan import SampleSpec
from baton.engine.cuda.decode_graphs import signed
from baton.engine.cuda.kernels.rows import cuts, sample_tokens
from baton.engine.cuda.upload import upload
from baton.engine.sampling import sample as sampling
from baton.types.params import SampledToken, SamplingParams

Specs = tuple[SampleSpec, ...]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of logits, numbered in the order of ``PlanRow.samples_by_row``.

    It implements ``baton.engine.sampling.speculative.LogitsRows``.

    Attributes:
        on_device: Tokens that the device sampled, by row.
        host_logits: Logits ``[1, V]`` of all other rows.
    """

    numbers: Sequence[int]
    on_device: Mapping[int, list[int]]
    host_logits: Mapping[int, torch.Tensor]

    def rows(self, indexes: Sequence[int]) -> "SampledRows":
        """Return some of the rows."""
        return SampledRows([self.numbers[i] for i in indexes], self.on_device, self.host_logits)

    def sample(
        self,
        specs: Sequence[Sequence[SampleSpec]],
        eos_token_ids: Sequence[int],
        masks: Sequence[Sequence[sampling.Mask | None]] | None = None,
    ) -> list[list[SampledToken]]:
        """Return the tokens of each row (``baton.engine.sampling.sample.sample``)."""
        sampled = []
        for index, number in enumerate(self.numbers):
            if number in self.on_device:
                sampled.append([SampledToken(token) for token in self.on_device[number]])
            else:
                logits = sampling.Logits(self.host_logits[number])
                own_masks = None if masks is None else [masks[index]]
                sampled += logits.sample([specs[index]], eos_token_ids, own_masks)
        return sampled


def start_sampling(specs_by_row: Mapping[int, Specs], logits_SV: torch.Tensor) -> SampledRows:
    """Sample what the device can, and fetch the logits of the rest; waits for both.

    Args:
        specs_by_row: Samples of each row, by the row's number.
        logits_SV: Finite logits of these rows, in this order.
    """
    on_device: list[tuple[int, int, SampleSpec]] = []
    fetched: list[tuple[int, int]] = []
    for place, (number, specs) in enumerate(specs_by_row.items()):
        if all(is_on_device(spec) for spec in specs):
            on_device += [(place, number, spec) for spec in specs]
        else:
            fetched.append((place, number))
    sampled: dict[int, list[int]] = {}
    if on_device:
        tokens = _sample_on_device([(place, spec) for place, _, spec in on_device], logits_SV)
        for (_, number, _), token in zip(on_device, tokens, strict=True):
            sampled.setdefault(number, []).append(token)
    host_logits: dict[int, torch.Tensor] = {}
    if fetched:
        places = {"places": torch.tensor([place for place, _ in fetched])}
        places_S = upload(logits_SV.device, places)["places"]
        host_SV = logits_SV.index_select(0, places_S).cpu()
        host_logits = {number: host_SV[i : i + 1] for i, (_, number) in enumerate(fetched)}
    return SampledRows(sorted(specs_by_row), sampled, host_logits)


def _sample_on_device(
    placed_specs: Sequence[tuple[int, SampleSpec]], logits_SV: torch.Tensor
) -> list[int]:
    """Sample one token for each spec, from the row of logits of that number."""
    params = [spec.params for _, spec in placed_specs]
    filtered = [i for i, p in enumerate(params) if is_filtered(p)]
    some = [params[i] for i in filtered]
    inputs = upload(
        logits_SV.device,
        {
            "rows": torch.tensor([row for row, _ in placed_specs]),
            "temperatures": torch.tensor([p.temperature for p in params], dtype=torch.float64),
            "seeds": torch.tensor([signed(p.seed) for p in params]),
            "choices": torch.tensor([signed(spec.choice) for _, spec in placed_specs]),
            "positions": torch.tensor([len(spec.history) for _, spec in placed_specs]),
            "filtered": torch.tensor(filtered, dtype=torch.int64),
            "top_k": torch.tensor([p.top_k for p in some], dtype=torch.int32),
            "top_p": torch.tensor([p.top_p for p in some], dtype=torch.float64),
            "min_p": torch.tensor([p.min_p for p in some], dtype=torch.float64),
        },
    )
    rows_SV = logits_SV.index_select(0, inputs["rows"])
    temperatures_S = inputs["temperatures"]
    cuts_S = None
    if filtered:
        places = inputs["filtered"]
        lowest_S = cuts(
            rows_SV.index_select(0, places),
            temperatures_S.index_select(0, places),
            inputs["top_k"],
            inputs["top_p"],
            inputs["min_p"],
        )
        cuts_S = torch.full((len(params),), -math.inf, device=logits_SV.device)
        cuts_S = cuts_S.index_copy_(0, places, lowest_S)
    tokens: list[int] = sample_tokens(
        rows_SV, temperatures_S, inputs["seeds"], inputs["choices"], inputs["positions"], cuts_S
    ).tolist()
    return tokens


def is_filtered(p: SamplingParams) -> bool:
    """Return whether some tokens may not be sampled."""
    return bool(p.temperature) and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)


def is_on_device(spec: SampleSpec) -> bool:
    """Return whether the device can sample it, so that nothing needs the host."""
    p = spec.params
    has_penalties = bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)
    ends_forbidden = len(spec.history) - spec.prompt_tokens < p.min_tokens
    return not (
        has_penalties
        or ends_forbidden
        or p.logprobs is not None
        or p.grammar
        or p.logit_bias
        or p.bad_words
    )
