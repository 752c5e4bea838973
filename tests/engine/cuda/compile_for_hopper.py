"""Compile kernels for compute capability 9.0, without a GPU; prints one JSON line for each.

python tests/engine/cuda/compile_for_hopper.py exact | all

``exact`` compiles the kernels of an exact Llama, ``all`` all kernels. Triton's compiler and
``ptxas`` need no driver. A driver that only names the device is put in place of the real one, and
launches end after compiling.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.engine.core.plan import StepPlan
from baton.engine.cuda.host_pool import HostPool
from baton.engine.cuda.kernels import configs, products, rows
from baton.engine.cuda.kernels.attention import Tiles, Workspace, list_items, paged_attention

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
BF16 = torch.bfloat16
KV_HEADS, GROUP = 8, 4


class NoDevice:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


FLOAT_OPERATION = re.compile(
    r"^\s*(?:@%p\d+ )?((?:add|sub|mul|fma|max|min|div|ex2)\.[\w.]*f32)", re.MULTILINE
)


def loops_over_keys(ptx: str) -> list[dict[str, int]]:
    """Count the fp32 operations of each innermost loop with matrix products."""
    lines = ptx.splitlines()
    labels: dict[str, int] = {}
    loops = []
    for number, line in enumerate(lines):
        if label := re.match(r"\s*(\$L__BB\w+):", line):
            labels[label[1]] = number
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)", line)
        if branch and branch[1] in labels:
            loops.append(range(labels[branch[1]], number))
    innermost = [
        loop
        for loop in loops
        if not any(inner != loop and inner[0] in loop and inner[-1] in loop for inner in loops)
    ]
    bodies = ("\n".join(lines[loop.start : loop.stop]) for loop in innermost)
    return [
        dict(sorted(Counter(FLOAT_OPERATION.findall(body)).items()))
        for body in bodies
        if re.search(r"mma(_async)?\.sync", body)
    ]


class Compiler:
    """Stands in for launches."""

    def __init__(self) -> None:
        self.title = ""
        self._run = JITFunction.run

    def __call__(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = self._run(kernel, *args, grid=grid, warmup=True, **options)
        ptx = compiled.asm["ptx"]
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            command = [str(PTXAS), "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
            if not compiled.metadata.enable_fp_fusion:
                command.append("--fmad=false")  # as Triton does
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        found = {
            "case": self.title,
            "kernel": kernel.__name__,
            "registers": int(re.search(r"Used (\d+) registers", said)[1]),
            "spill_bytes": int(re.search(r"(\d+) bytes spill stores", said)[1]),
            "shared_bytes": compiled.metadata.shared,
            "wgmma": "wgmma.mma_async" in ptx,
            "wide_stores": len(re.findall(r"st\.global\.v4\.b32", ptx)),
            "wide_async_copies": len(re.findall(r"cp\.async\.cg.* 0x10", ptx)),
            "async_waits": [
                int(count)
                for count in re.findall(r"async_wait[^{]*\{num = (\d+)", compiled.asm["ttgir"])
            ],
            "loops": loops_over_keys(ptx),
            "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
            "may_fuse": len(re.findall(r"\b(?:mul|add|sub)\.(?:ftz\.)?f32", ptx)),
        }
        print(json.dumps(found), flush=True)
        return compiled


def attention(cut: configs.AttentionConfig, dim: int, *, spread: bool, window: int = 0) -> None:
    pool = torch.zeros(2, 8, 16, KV_HEADS, dim, dtype=BF16)
    q = torch.zeros(64, KV_HEADS * GROUP, dim, dtype=BF16)
    tables = torch.zeros(4, 16, dtype=torch.int32)
    queries = 1 if spread else cut.queries(GROUP)
    items = torch.zeros(2, 64, dtype=torch.int32) if spread else None
    tiles = Tiles(torch.zeros(5, 16, dtype=torch.int32), items, queries)
    space = Workspace(torch.device("cpu"))
    paged_attention(q, pool, tables, tiles, torch.zeros_like(q), cut, space, window=window)


def main(which: str) -> None:
    driver.set_active(NoDevice())
    compiler = Compiler()
    JITFunction.run = lambda kernel, *args, **options: compiler(kernel, *args, **options)
    everything = which == "all"
    for dim in (64, 128, 256) if everything else (128,):
        for kind in ("decode", "prefill"):
            for exact in (True, False) if everything else (True,):
                compiler.title = f"{'exact' if exact else 'fast'} {kind} {dim}"
                cut = configs.attention_config(kind, dim, exact=exact)
                attention(cut, dim, spread=kind == "decode")
    for kind in ("decode", "prefill") if everything else ():  # Gemma 3
        compiler.title = f"exact {kind} 256, window"
        cut = configs.attention_config(kind, 256, exact=True)
        attention(cut, 256, spread=kind == "decode", window=99)
    compile_rows(compiler)
    for name, cut in (("few", configs.EXACT_ROWS), ("many", configs.EXACT_MANY_ROWS)):
        compiler.title = f"product of {name} rows"
        weight = torch.zeros(6144, 4096, dtype=BF16)
        x = torch.zeros(64, 4096, dtype=BF16)
        products.fixed_linear(x, weight, cut, BF16)
        compiler.title += ", fp8 weight"
        products.fixed_linear(x, products.to_fp8(weight), cut, BF16)
    if everything:
        compiler.title = "fast product of few rows, fp8 weight"
        products.fixed_linear(x, products.to_fp8(weight), configs.FP8_FEW_ROWS, BF16)
        compiler.title = "fast prefill 128, window"
        cut = configs.attention_config("prefill", 128, exact=False)
        attention(cut, 128, spread=False, window=99)
        compile_sampling(compiler)
        compiler.title = "blocks"
        pool = torch.zeros(2, 2, 8, 16, 8, 128, dtype=BF16)
        HostPool(pool, torch.zeros_like(pool)).before(StepPlan((), written=(1, 2)))


def compile_rows(compiler: Compiler) -> None:
    list_items(torch.zeros(5, 128, dtype=torch.int32), torch.zeros(2, 512, dtype=torch.int32), 256)
    compiler.title = "rows"
    x, delta = torch.zeros(64, 4096), torch.zeros(64, 4096, dtype=BF16)
    weight = torch.zeros(4096)
    rows.add_norm(x, delta, weight, 1e-5, BF16)
    rows.add_norm(x, delta, weight, 1e-5, BF16, weight)
    rows.add_to(x, delta, 1e-5, None)
    for gelu in (False, True):
        rows.gate_mul(torch.zeros(64, 2 * 14336, dtype=BF16), gelu=gelu)
    index = torch.zeros(64, dtype=torch.int32)
    qkv, pool = torch.zeros(64, 48 * 128, dtype=BF16), torch.zeros(2, 8, 16, 8, 128, dtype=BF16)
    turns, norm, bias = torch.zeros(99, 64, 2), torch.zeros(40, 128), torch.zeros(48 * 128)
    for width in (1, 15, 16):  # a stride of 1 and multiples of 16 are compiled apart
        tables = torch.zeros(4, width, dtype=torch.int32)
        rows.rope_write(qkv, 32, index, index, turns, tables, pool)
        rows.rope_write(qkv, 32, index, index, turns, tables, pool, bias=bias, norm=norm, eps=1e-6)


def compile_sampling(compiler: Compiler) -> None:
    compiler.title = "sampling"
    zeros = torch.zeros(4, dtype=torch.int64)
    hot, logits = zeros.double(), torch.zeros(4, 128256)
    rows.sample_tokens(logits, hot, zeros, zeros, zeros)
    rows.sample_tokens(
        logits, hot, zeros, zeros, zeros, rows.cuts(logits, hot, zeros.int(), hot, hot)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
