"""Loads a decoder into memory from an artifact on disk, packing each weight at once."""

import torch

from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.linear import ANY_ROWS, Linear, RowCounts, probe_row_counts
from baton.engine.cpu.parallel.shard import Shard
from baton.engine.cpu.quantised import packer
from baton.engine.loading.memory import product_shapes
from baton.engine.loading.open import open_weights
from baton.engine.loading.weights import Progress, all_rows, silent
from baton.engine.numerics import DTYPES, Numerics
from baton.model.artifact import ModelArtifact
from baton.telemetry.process_memory import give_back

_GIVE_BACK_BYTES = 4 << 20


def load_model(
    artifact: ModelArtifact,
    dtype: str,
    numerics: Numerics,
    *,
    quantisation: str = "none",
    progress: Progress = silent,
    shard: Shard | None = None,
) -> Decoder:
    """Load, convert and pack a model.

    Args:
        artifact: The model, from ``resolve_model``.
        dtype: ``bf16`` or ``fp32``.
        numerics: ``exact`` probes the permitted row counts of each weight shape first.
        quantisation: Format of the layers' weights: ``none``, ``int8`` or ``int4``.
        progress: Called as weights are loaded.
        shard: Load this rank's part only; the leader's starts loading on the other ranks.

    Raises:
        ModelError: Something is missing or not supported; then nothing was loaded.
    """
    quantised = packer(quantisation, dtype)
    probed: dict[tuple[int, int], RowCounts] = {}

    def row_counts(outputs: int, inputs: int) -> RowCounts:
        if numerics == "fast":
            return ANY_ROWS
        shape = (outputs, inputs)
        if shape not in probed:
            progress("probe", len(probed), 5)
            probed[shape] = probe_row_counts(outputs, inputs, DTYPES[dtype])
        return probed[shape]

    packed_bytes = 0

    def pack(name: str, weight: torch.Tensor) -> Linear:
        nonlocal packed_bytes
        layer = quantised(name, weight) or Linear(weight, row_counts(*weight.shape))
        packed_bytes += weight.nbytes
        if packed_bytes >= _GIVE_BACK_BYTES:  # otherwise the gaps that packing leaves add up
            packed_bytes = 0
            give_back()
        return layer

    if shard is None and quantisation == "none":
        # before any weight is in memory: the probes need memory too
        for shape in dict.fromkeys(product_shapes(artifact.config)):
            row_counts(*shape)
    rows = all_rows if shard is None else shard.rows
    label = "" if quantisation == "none" else quantisation
    with open_weights(artifact, dtype, progress, rows) as weights:
        if shard is not None:
            shard.load()  # converted weights are in the cache now
        model = Decoder(artifact.config, weights, DTYPES[dtype], pack, label, shard)
    give_back()
    return model
