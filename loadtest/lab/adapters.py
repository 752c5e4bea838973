"""Lab: cost of a step whose batch has more and more LoRA adapters."""

import json
import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.engine.llm import LLM
from baton.model.lora_artifact import TARGETS, read_adapter, target_shapes
from baton.model.model_config import ModelConfig
from baton.types.params import AdapterRef
from loadtest.commands.points import measured
from loadtest.lab.driver import Driver, engine, warm
from loadtest.lab.results import Cell, Findings, Plot, Series
from loadtest.lab.table import LabContext

BATCH = 8
CONTEXT = 64
RANK = 16
_ATTENTION = TARGETS[:4]


def run(context: LabContext) -> Findings:
    """Measure the same requests with 0, 1, 2 … adapters."""
    llm = engine(context, kv_blocks=256)
    warm(llm)
    steps = 12 if context.quick else 48
    counts = (0, 1, 4, 8) if context.quick else (0, 1, 2, 3, 4, 6, 8)
    with tempfile.TemporaryDirectory() as folder:
        refs = [_load(llm, Path(folder) / f"adapter-{i}", i) for i in range(max(counts))]
    rows = measured(counts, lambda count: _measure(llm, refs[:count], steps), at_least=2)
    plain_ms = float(str(rows[0][1]))
    last = rows[-1]
    return Findings(
        left_out=rows.left_out,
        parameters={
            "batch": BATCH,
            "context, tokens": CONTEXT,
            "steps": steps,
            "rank of the adapters": RANK,
            "their targets": ", ".join(TARGETS),
            "their weights": "random",
        },
        columns=["adapters", "step ms", "÷ none", "tok/s", "prompts' step ms"],
        rows=[[*row[:2], float(str(row[1])) / plain_ms, *row[2:]] for row in rows],
        plots=[
            Plot(
                title=f"A decode step of {BATCH} requests",
                x_label="adapters in the batch",
                y_label="ms",
                x=[float(str(row[0])) for row in rows],
                series=[Series("median step", [float(str(row[1])) for row in rows])],
                caption="0: no request has one; 1: all share it; 8: each has its own.",
            )
        ],
        sentence=f"With {last[0]} adapters a step of a batch of {BATCH} took "
        f"{float(str(last[1])):.1f} ms, {float(str(last[1])) / plain_ms:.2f} × the time without; "
        f"with one for all, {float(str(rows[1][1])) / plain_ms:.2f} ×.",
        notes=["Loading an adapter takes additional time, which is excluded."],
    )


def _measure(llm: LLM, refs: list[AdapterRef], steps: int) -> list[Cell]:
    driver = Driver(llm)
    for seed in range(BATCH):
        adapter = refs[seed % len(refs)] if refs else None
        driver.submit(driver.prompt(CONTEXT, seed), steps + 1, adapter)
    driver.run()
    decode_s = [step.seconds for step in driver.steps if step.decode_rows == BATCH]
    prompt_s = sum(step.seconds for step in driver.steps if step.prompt_tokens)
    median_s = statistics.median(decode_s)
    return [len(refs), 1e3 * median_s, BATCH / median_s, 1e3 * prompt_s]


def _load(llm: LLM, folder: Path, seed: int) -> AdapterRef:
    _write(folder, llm.artifact.config, seed)
    artifact = read_adapter(folder, llm.artifact.config, RANK)
    ref = AdapterRef(folder.name, artifact.digest.hex(), str(folder))
    llm.runner.adapters.add(ref, llm.runner.adapters.prepare(ref))
    return ref


def _write(folder: Path, config: ModelConfig, seed: int) -> None:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for target, (outputs, inputs) in target_shapes(config).items():
        part = "self_attn" if target in _ATTENTION else "mlp"
        for layer in range(config.num_layers):
            stem = f"base_model.model.model.layers.{layer}.{part}.{target}"
            a = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            weights[f"{stem}.lora_A.weight"] = a
            weights[f"{stem}.lora_B.weight"] = 0.02 * torch.randn(
                outputs, RANK, generator=generator
            )
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
