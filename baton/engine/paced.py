"""Emulated engine of a fleet: real protocol, synthetic tokens, realistic step times.

A timing model (``baton/engine/emulated_timing.py``) gives the step time. The KV bytes are written
at once, and the rest of the time is slept. As in every emulated engine, a token is a digest of the
sequence's KV, so that errors of a KV transfer change the response.
"""

import logging
import time
from collections.abc import Callable

import numpy as np

from baton.engine.core.model_runner import RunnerCapabilities
from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.emulated import EmulatedRunner
from baton.engine.emulated_timing import TIMINGS
from baton.engine.settings import EmulatedModel
from baton.types.geometry import KvGeometry
from baton.types.params import SampledToken

_LOG = logging.getLogger(__name__)

MEAN_ANSWER_TOKENS = 256  # mean length of responses without another limit
DEFAULT_BLOCKS = 4096
LATE = 1.1  # ratio of actual to modelled time above which a warning is logged
_CHECK_EVERY_S = 30.0
_MIX = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)


def paced_geometry(num_blocks: int) -> KvGeometry:
    """Return the pool of an emulated model: 128 bytes per token, so that many pools fit."""
    return KvGeometry(
        num_layers=4,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=num_blocks or DEFAULT_BLOCKS,
        dtype="bf16",
    )


class PacedRunner(EmulatedRunner):
    """``ModelRunner`` that takes as long as a real model."""

    def __init__(
        self,
        geometry: KvGeometry,
        pool_bytes: memoryview | bytearray,
        model: EmulatedModel,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(geometry, pool_bytes, model.vocab_size, model.eos_token_ids)
        self.capabilities = RunnerCapabilities(
            engine="an emulated engine", logprobs=False, logit_bias=False, bad_words=False
        )
        self._timing = TIMINGS[model.timing]
        self._clock_s = clock_s
        self._sleep = sleep
        self._took_s = self._modelled_s = 0.0  # since the last check
        self._check_s = clock_s() + _CHECK_EVERY_S
        layers, components, _, _, row_bytes = self._pool.shape
        places = np.arange(layers * components * row_bytes, dtype=np.uint64)
        self._places = (places * _MIX[2]).reshape(layers, components, 1, row_bytes)

    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        """Run one step; see ``ModelRunner.execute``."""
        began_s = self._clock_s()
        total_s = self._timing.seconds(plan.rows)
        for source, target in plan.copies:
            self._pool[:, :, target] = self._pool[:, :, source]
        for row in plan.rows:
            self._write_all(row)
        sampled = [self._sample(row) for row in plan.rows]
        layers = self.geometry.num_layers
        for done in range(1, layers + 1) if on_layers_done else (layers,):
            left_s = began_s + total_s * done / layers - self._clock_s()
            if left_s > 0:
                self._sleep(left_s)
            if on_layers_done:
                on_layers_done(done)
        self._note_end(self._clock_s(), self._clock_s() - began_s, total_s)
        return sampled

    def _note_end(self, now_s: float, took_s: float, modelled_s: float) -> None:
        """Warn periodically if the machine is too busy for realistic figures."""
        self._took_s += took_s
        self._modelled_s += modelled_s
        if now_s < self._check_s:
            return
        if self._took_s > LATE * self._modelled_s:
            share = self._took_s / self._modelled_s - 1
            _LOG.warning(
                "emulated steps take %.0f %% longer than timing=%s: the machine is too busy",
                100 * share,
                self._timing.name,
            )
        self._took_s = self._modelled_s = 0.0
        self._check_s = now_s + _CHECK_EVERY_S

    def _write_all(self, row: PlanRow) -> None:
        tokens = np.asarray(row.tokens, np.uint64)
        positions = np.arange(row.start, row.start + len(tokens))
        blocks = np.asarray(row.block_ids)[positions // self.geometry.block_tokens]
        own = tokens * _MIX[0] + positions.astype(np.uint64) * _MIX[1]
        mixed = (own[None, None, :, None] + self._places) * _MIX[3]
        slots = positions % self.geometry.block_tokens
        self._pool[:, :, blocks, slots] = (mixed >> np.uint64(56)).astype(np.uint8)

    def _token(self, number: int) -> int:
        """Return an end token now and then, else an ordinary token."""
        number, chance = divmod(number, MEAN_ANSWER_TOKENS)
        if chance == 0 and self.eos_token_ids:
            return self.eos_token_ids[0]
        low = self._vocab_size // 64  # special tokens are at both ends of a vocabulary
        high = self._vocab_size // 2
        return low + number % (high - low)
