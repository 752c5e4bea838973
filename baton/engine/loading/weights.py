"""Weights of a model, each read from disk on access and never kept.

Packed weights take about as much memory as the tensors that were read. So the peak while loading is
the model and one tensor, not two models. ``baton/engine/loading/open.py`` creates these mappings.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping

import torch

from baton.engine.models.family import WeightName
from baton.engine.models.rope import pair_rows
from baton.model.artifact import ModelError

Progress = Callable[[str, int, int], None]
"""Function of ``(stage, done, total)``; the stages are "probe", "convert", "read"."""

Rows = Callable[[str], slice]
"""Function from the canonical name of a weight to the rows to read."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress of loading."""


def all_rows(name: str) -> slice:
    """Return a slice of the whole weight."""
    return slice(None)


class Weights(MutableMapping[str, torch.Tensor]):
    """Contiguous tensors by canonical name (``families.weight_table``), each read on access."""

    def __init__(
        self, where: str, readers: Mapping[str, Callable[[], torch.Tensor]], progress: Progress
    ) -> None:
        self._where = where
        self._readers = dict(readers)
        self._total = len(self._readers)
        self._progress = progress

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a weight, or raise ``ModelError``."""
        read = self._readers[name]
        try:
            weight = read()
        except (ValueError, OSError) as error:
            raise ModelError(f"{self._where}: {name} cannot be read ({error})") from error
        if weight.numel() and not all(map(torch.isfinite, torch.aminmax(weight))):
            raise ModelError(f"{self._where}: {name} contains NaN or Inf; the file may be damaged")
        return weight

    def __delitem__(self, name: str) -> None:
        del self._readers[name]
        self._progress("read", self._total - len(self._readers), self._total)

    def __setitem__(self, name: str, weight: torch.Tensor) -> None:
        """Replace the tensor of a weight."""
        self._readers[name] = lambda: weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def finished(
    entry: WeightName, weight: torch.Tensor, dtype: torch.dtype, head_dim: int
) -> torch.Tensor:
    """Return a weight in the model's form. Norms and biases stay in fp32: they are small."""
    weight = weight.to(torch.float32 if weight.ndim == 1 else dtype)
    if entry.add_one:
        weight = weight + 1.0
    return (pair_rows(weight, head_dim) if entry.pairs else weight).contiguous()
