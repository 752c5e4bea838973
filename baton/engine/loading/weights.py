"""The weights of a model, each read from disk when it is asked for, and never kept.

What is packed takes about as much memory as what was read; so the peak while loading is the model
and one tensor, not two models. ``baton/engine/loading/open.py`` makes these mappings.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping

import torch

from baton.engine.models.family import GLOBAL_NAMES, IGNORED, ROPE_FACTORS, WeightName
from baton.engine.models.rope import pair_rows
from baton.model.artifact import ModelArtifact, ModelError

Progress = Callable[[str, int, int], None]
"""``(stage, done, total)``; the stages are "probe", "convert", "read"."""

Rows = Callable[[str], slice]
"""Canonical name of a weight -> the rows of it that are wanted."""


def silent(stage: str, done: int, total: int) -> None:
    """No progress wanted."""


def all_rows(name: str) -> slice:
    """The whole weight."""
    return slice(None)


class Weights(MutableMapping[str, torch.Tensor]):
    """Canonical name (``families.weight_table``) -> tensor, contiguous; ``pop`` to read each once.

    Args:
        where: The model, for messages.
        readers: How each is read.
        progress: Called as weights go by.
    """

    def __init__(
        self, where: str, readers: Mapping[str, Callable[[], torch.Tensor]], progress: Progress
    ) -> None:
        self._where = where
        self._readers = dict(readers)
        self._total = len(self._readers)
        self._progress = progress

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read one.

        Raises:
            ModelError: Its file has become shorter or cannot be read, or it holds NaN or Inf.
        """
        read = self._readers[name]
        try:
            weight = read()
        except (ValueError, OSError) as error:
            raise ModelError(f"{self._where}: {name} cannot be read ({error})") from error
        if weight.numel() and not all(map(torch.isfinite, torch.aminmax(weight))):
            raise ModelError(f"{self._where}: {name} holds NaN or Inf; is the file damaged?")
        return weight

    def __delitem__(self, name: str) -> None:
        del self._readers[name]
        self._progress("read", self._total - len(self._readers), self._total)

    def __setitem__(self, name: str, weight: torch.Tensor) -> None:
        """Something else in its place."""
        self._readers[name] = lambda: weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def finished(
    entry: WeightName, weight: torch.Tensor, dtype: torch.dtype, head_dim: int
) -> torch.Tensor:
    """A weight as the model wants it. Norms and biases stay in fp32: they are small."""
    weight = weight.to(torch.float32 if weight.ndim == 1 else dtype)
    if entry.add_one:
        weight = weight + 1.0
    return (pair_rows(weight, head_dim) if entry.pairs else weight).contiguous()


def check_table(
    artifact: ModelArtifact,
    table: Iterable[WeightName],
    names: Iterable[str],
    problem: Callable[[WeightName], str],
) -> None:
    """Compare what a family needs with what is there, before anything is read.

    Args:
        artifact: For messages.
        table: What is needed.
        names: Of all tensors that are there.
        problem: What is wrong with one of them that is there, or "".

    Raises:
        ModelError: It names the first few that are missing, wrong, or not known.
    """
    table = list(table)
    names = set(names)
    problems = [
        f"{entry.source} is missing" if entry.source not in names else problem(entry)
        for entry in table
    ]
    # a tied model may store its head all the same
    known = {entry.source for entry in table} | {ROPE_FACTORS, *GLOBAL_NAMES["head"]}
    unknown = sorted(n for n in names - known if not n.endswith(IGNORED))
    if unknown:
        listed = ", ".join(unknown[:4])
        problems.append(f"{len(unknown)} weights are not part of the family ({listed})")
    problems = [text for text in problems if text]
    if problems:
        shown = "; ".join(problems[:4])
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ModelError(
            f"{artifact.path}: architecture {artifact.architecture}, "
            f"quantisation {artifact.quantisation}: {shown}{more}"
        )
