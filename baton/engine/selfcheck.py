"""Speed of the engine against a plain torch program, in a few seconds."""

# ruff: noqa: N803, N806 - suffixes such as q_BHTD give shapes

import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.cpu.load import load_model
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling
from baton.engine.ipc import own_pool
from baton.engine.loading.memory import kv_geometry
from baton.engine.loading.open import load_weights
from baton.engine.models.rope import unpair_rows
from baton.engine.numerics import Numerics
from baton.model.artifact import ModelArtifact, ModelConfig, resolve_model
from baton.types.geometry import BLOCK_TOKENS
from baton.types.params import SamplingParams

PROMPT_TOKENS = 128
BATCH = 4
READ_BYTES = 1 << 28  # more than the caches hold
_ROUNDS = 2
_STEPS = 4
MAX_BATCH = 32
WARM_TOKENS = 1000  # limit of output tokens per measured sequence


class Speed(NamedTuple):
    """Speed of the engine as a multiple of the dense program's.

    ``bound_share`` is the least time of a decode step by ``ReadBound``, divided by the actual one.
    """

    prefill: float
    decode: float
    bound_share: float


class NoPeerError(ValueError):
    """The dense program supports only plain Llama shapes."""


def measure(model: str, dtype: str, threads: int) -> Speed:
    """Compare engine and dense program in this process; restore torch's number of threads.

    Raises:
        ModelError: The model cannot be loaded.
        NoPeerError: The dense program cannot run this model.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measure(model, dtype)
    finally:
        torch.set_num_threads(before)


def _measure(model: str, dtype: str) -> Speed:
    artifact = resolve_model(model)
    if artifact.config.family != "llama":
        raise NoPeerError(f"the dense program supports Llama, not {artifact.config.family}")
    context = PROMPT_TOKENS + _ROUNDS * _STEPS + 8
    with torch.inference_mode():
        weights = load_weights(artifact, dtype)
        bound = ReadBound(weights, artifact.config, dtype)
        dense = DenseLlama(artifact.config, weights, BATCH, context)
    blocks = BATCH * -(-(PROMPT_TOKENS + WARM_TOKENS) // BLOCK_TOKENS)
    engine = EngineUnderTest(artifact, dtype, "exact", blocks)
    prompt = torch.randint(artifact.config.vocab_size, (1, PROMPT_TOKENS))
    prefills: list[tuple[float, float]] = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        dense.step(prompt, 0)
        between = time.perf_counter()
        engine.prefill(PROMPT_TOKENS)
        prefills.append((between - began, time.perf_counter() - between))
    names = engine.warm(BATCH, PROMPT_TOKENS // 2)
    tokens = torch.randint(artifact.config.vocab_size, (BATCH, 1))
    steps: list[tuple[float, float]] = []
    least_s: list[float] = []
    for position in range(PROMPT_TOKENS // 2, PROMPT_TOKENS // 2 + _ROUNDS * _STEPS):
        began = time.perf_counter()
        tokens = dense.step(tokens, position)
        between = time.perf_counter()
        engine.step()
        steps.append((between - began, time.perf_counter() - between))
        least_s.append(bound.step_s(bound.probe_s(), BATCH, position))
    engine.cancel(names)
    del prefills[0], steps[:_STEPS]  # they warm the caches
    share = statistics.median(least_s) / statistics.median(engine for _, engine in steps)
    return Speed(_ratio(prefills), _ratio(steps), share)


def _ratio(times: list[tuple[float, float]]) -> float:
    dense = statistics.median(dense for dense, _ in times)
    return dense / statistics.median(engine for _, engine in times)


class ReadBound:
    """Time of reading as many bytes as a decode step, in order, with torch's threads.

    A step reads all weights, and the KV of each sequence.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], config: ModelConfig, dtype: str
    ) -> None:
        self._weight_bytes = sum(weight.nbytes for weight in weights.values())
        if "head" in weights:  # of the embeddings, few rows are read
            self._weight_bytes -= weights["embed"].nbytes
        self._token_bytes = kv_geometry(config, dtype, 1).pool_bytes // BLOCK_TOKENS
        self._windows = config.layer_windows or (None,)
        self._memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)

    def probe_s(self) -> float:
        """Read memory once, and return the seconds that it took."""
        began_s = time.perf_counter()
        self._memory.sum()
        return time.perf_counter() - began_s

    def step_s(self, probe_s: float, batch: int, context: int) -> float:
        """Return the least seconds of a step of ``batch`` sequences, by a probe's seconds."""
        tokens = sum(min(window or context, context) for window in self._windows)
        kv_bytes = batch * tokens * self._token_bytes / len(self._windows)
        return probe_s * (self._weight_bytes + kv_bytes) / READ_BYTES


class DenseLlama:
    """Baseline: a Llama in plain torch, over a cache ``[layer][k|v][batch, heads, tokens, dim]``.

    A preallocated cache of equal lengths, fused QKV and gate-up, eager kernels, SDPA, greedy. No
    scheduler, no paging, no exact numerics. It is optimised for speed.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        max_batch: int,
        max_tokens: int,
    ) -> None:
        c = self.config = config
        w = weights
        self.embed = w["embed"]
        self.head = w.get("head", w["embed"])
        dtype = self.embed.dtype  # also of the norms: torch fuses only then
        self.final_norm = w["final_norm"].to(dtype)
        self.layers = []
        for i in range(c.num_layers):
            p = f"layers.{i}."
            q, k = (unpair_rows(w[p + name], c.head_dim) for name in ("q", "k"))
            self.layers.append(
                (
                    w[p + "attn_norm"].to(dtype),
                    torch.cat((q, k, w[p + "v"])),
                    w[p + "o"],
                    w[p + "mlp_norm"].to(dtype),
                    torch.cat((w[p + "gate"], w[p + "up"])),
                    w[p + "down"],
                )
            )
        shape = (c.num_layers, 2, max_batch, c.num_kv_heads, max_tokens, c.head_dim)
        self.cache = torch.randn(shape, dtype=torch.float32).to(dtype)
        exponents = torch.arange(0, c.head_dim, 2) / c.head_dim
        angles = torch.outer(torch.arange(max_tokens), 1.0 / c.rope_theta**exponents)
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)

    @torch.inference_mode()
    def step(self, tokens_BT: torch.Tensor, start: int) -> torch.Tensor:
        """Compute ``tokens_BT`` at positions ``start ...``; return the next tokens ``[B, 1]``."""
        c = self.config
        batch, count = tokens_BT.shape
        end = start + count
        dim = c.head_dim
        eps = c.rms_norm_eps
        cos = self.cos[start:end, None]
        sin = self.sin[start:end, None]
        rotated_heads = c.num_heads + c.num_kv_heads
        x = F.embedding(tokens_BT, self.embed)
        for layer, (attn_norm, qkv_w, o_w, mlp_norm, gate_up_w, down_w) in enumerate(self.layers):
            h = F.rms_norm(x, (c.hidden_size,), attn_norm, eps)
            qkv = F.linear(h, qkv_w).view(batch, count, -1, dim)
            qk = qkv[:, :, :rotated_heads]
            half = torch.cat((qk[..., dim // 2 :], qk[..., : dim // 2]), dim=-1)
            qk = (qk * cos).add_(half.mul_(sin))
            q_BHTD = qk[:, :, : c.num_heads].transpose(1, 2)
            k_cache = self.cache[layer, 0, :batch]
            v_cache = self.cache[layer, 1, :batch]
            k_cache[:, :, start:end] = qk[:, :, c.num_heads :].transpose(1, 2)
            v_cache[:, :, start:end] = qkv[:, :, rotated_heads:].transpose(1, 2)
            a_BHTD = F.scaled_dot_product_attention(
                q_BHTD,
                k_cache[:, :, :end],
                v_cache[:, :, :end],
                is_causal=count > 1,
                enable_gqa=True,
            )
            x = x + F.linear(a_BHTD.transpose(1, 2).reshape(batch, count, -1), o_w)
            h = F.rms_norm(x, (c.hidden_size,), mlp_norm, eps)
            gate, up = F.linear(h, gate_up_w).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), down_w)
        h = F.rms_norm(x[:, -1], (c.hidden_size,), self.final_norm, eps)
        return F.linear(h, self.head).max(dim=-1, keepdim=True).indices


class EngineUnderTest:
    """Engine with its scheduler, stepped by the caller."""

    def __init__(
        self,
        artifact: ModelArtifact,
        dtype: str,
        numerics: Numerics,
        blocks: int,
        weights: str = "none",
        kv: str = "",
    ) -> None:
        with torch.inference_mode():
            model = load_model(artifact, dtype, numerics, quantisation=weights)
            tiling = attention_tiling(artifact.config, dtype, numerics, kv)
        geometry = kv_geometry(artifact.config, kv or dtype, blocks)
        runner = CpuRunner(model, own_pool(geometry), geometry, tiling)
        self.core = EngineCore(runner, SchedulerConfig(max_batch_requests=MAX_BATCH))
        self._vocab = artifact.config.vocab_size
        self._count = 0

    def submit(self, prompt_tokens: int, max_tokens: int) -> str:
        """Queue a prompt of random, uncached tokens and return the request's id."""
        self._count += 1
        generator = torch.Generator().manual_seed(self._count)
        prompt = torch.randint(self._vocab, (prompt_tokens,), generator=generator).tolist()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        name = f"bench-{self._count}"
        spec = RequestSpec(
            kind=Kind.FULL, params=params, hash_seed=b"bench", ticket=self._count, cacheable=False
        )
        request = EngineRequest(request_id=name, prompt=prompt, spec=spec)
        self.core.scheduler.submit(request, time.monotonic_ns())
        return name

    def step(self, unbounded: bool = False) -> int:
        """Run one step and return its number of tokens.

        ``unbounded`` hides the step's duration from the scheduler, which limits chunks for
        fairness. This shortens warming up.
        """
        began_ns = time.monotonic_ns()
        plan = self.core.plan(began_ns)
        results = self.core.runner.execute(plan)
        now_ns = time.monotonic_ns()
        self.core.apply(plan, results, now_ns, 1 if unbounded else now_ns - began_ns)
        return sum(len(row.tokens) for row in plan.rows)

    def prefill(self, tokens: int) -> None:
        """Compute one prompt and sample one token."""
        self.submit(tokens, max_tokens=1)
        while self.core.batch.has_work():
            self.step()

    def warm(self, batch: int, context: int) -> list[str]:
        """Run ``batch`` sequences until they decode."""
        names = [self.submit(context, max_tokens=WARM_TOKENS) for _ in range(batch)]
        while self.step(unbounded=True) != batch:
            pass
        return names

    def cancel(self, names: list[str]) -> None:
        """Cancel requests by their ids."""
        for name in names:
            self.core.scheduler.cancel(name)
        self.core.take_events()
