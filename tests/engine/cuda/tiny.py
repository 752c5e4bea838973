"""A small random Llama in both engines."""

import functools

import torch

from baton.engine.core.plan import PlanRow, SampleSpec, StepPlan
from baton.engine.cpu import selftest
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cuda.build import make_decoder
from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.lora import CudaAdapters
from baton.engine.cuda.runner import CudaRunner
from baton.engine.models.families import weight_table
from baton.engine.numerics import DTYPES
from baton.engine.sampling.grammars import Grammars
from baton.model.artifact import ModelConfig
from baton.types.geometry import KvGeometry
from baton.types.params import SampledToken, SamplingParams

BLOCK = 16
BLOCKS = 24
CPU = torch.device("cpu")


def config(
    heads: int = 3,
    kv_heads: int = 1,
    *,
    layers: int = 2,
    tied: bool = False,
    max_context_tokens: int = 36,
) -> ModelConfig:
    return ModelConfig(
        hidden_size=24,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        intermediate_size=40,
        vocab_size=97,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        max_context_tokens=max_context_tokens,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_ids=(2,),
    )


def weights(c: ModelConfig, dtype: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {}
    for entry in weight_table(c, "gguf"):
        matrix = len(entry.shape) > 1
        value = torch.randn(entry.shape) * (0.3 if matrix else 0.1) + (0.0 if matrix else 1.0)
        found[entry.name] = value.to(DTYPES[dtype])
    return found


def geometry(c: ModelConfig, dtype: str) -> KvGeometry:
    return KvGeometry(
        num_layers=c.num_layers,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        num_blocks=BLOCKS,
        dtype=dtype,
    )


def decoder(
    c: ModelConfig | None = None,
    dtype: str = "fp32",
    *,
    exact: bool = True,
    fp8: bool = False,
) -> CudaDecoder:
    c = c or config()
    return make_decoder(
        c, weights(c, dtype), geometry(c, dtype), CPU, c.max_context_tokens, exact=exact, fp8=fp8
    )


def cuda_runner(
    c: ModelConfig, dtype: str, pool: bytearray, grammars: Grammars | None = None
) -> CudaRunner:
    model = decoder(c, dtype)
    shape, adapters = geometry(c, dtype), CudaAdapters(c, model)
    return CudaRunner(model, pool, shape, c.eos_token_ids, adapters, grammars)


def torch_runner(
    c: ModelConfig, dtype: str, pool: bytearray, grammars: Grammars | None = None
) -> CpuRunner:
    model = Decoder(c, weights(c, dtype), DTYPES[dtype])
    tiling = selftest.fast_tiling(c.num_heads // c.num_kv_heads)
    shape = geometry(c, dtype)
    return CpuRunner(model, pool, shape, tiling, c.eos_token_ids, grammars=grammars)


@functools.cache
def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(97, (count,), generator=generator).tolist())


def row(
    sequence: int,
    all_tokens: list[int] | tuple[int, ...],
    start: int,
    end: int,
    table: list[int],
    params: SamplingParams | None = None,
    prompt: int = 0,
) -> PlanRow:
    specs: tuple[SampleSpec, ...] = ()
    if params is not None:
        specs = tuple(
            SampleSpec(choice, params, list(all_tokens), prompt or len(all_tokens))
            for choice in range(params.n)
        )
    return PlanRow(
        sequence_id=sequence,
        tokens=list(all_tokens[start:end]),
        start=start,
        block_ids=table[: -(-end // BLOCK)],
        samples=specs,
    )


def step(runner: CudaRunner | CpuRunner, *rows: PlanRow) -> list[list[SampledToken]]:
    return runner.execute(StepPlan(rows))
