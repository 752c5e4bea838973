"""Loading needs little more memory than the model: at most 1.3 times its final size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.text.artifact import ModelArtifact
from tests.engine.conftest import GEMMA, MODEL

LIMIT = 1.3
PROGRAM = """
import gc, json, sys
from pathlib import Path
import psutil, torch
from engine.loading import load_model
from engine.text.artifact import resolve_model

torch.set_num_threads(1)
artifact = resolve_model(sys.argv[1])
torch.nn.functional.linear(torch.randn(300, 300), torch.randn(300, 300))
gc.collect()
before = psutil.Process().memory_info().rss
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
stages = []
with torch.inference_mode():
    model = load_model(
        artifact, sys.argv[2], "fast", cache_dir=Path(sys.argv[3]),
        progress=lambda stage, done, total: stages.append(stage),
    )
gc.collect()
after = psutil.Process().memory_info().rss
status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
peak = 1024 * int(status.split()[0])
print(json.dumps({"size": after - before, "peak": peak - before, "stages": sorted(set(stages))}))
"""


def loaded(reference: str, dtype: str, cache: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, reference, dtype, str(cache)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("reference", [MODEL, GEMMA], ids=["smollm2", "gemma3"])
def test_the_peak_stays_near_the_final_size(
    tmp_path: Path, gemma: ModelArtifact, reference: str, dtype: str
) -> None:
    weights = {MODEL: 134.5e6, GEMMA: 268.1e6}[reference] * {"bf16": 2, "fp32": 4}[dtype]
    for stages in (["convert"], []):  # from GGUF, then from the cache of converted weights
        found = loaded(reference, dtype, tmp_path)
        assert found["stages"] == stages
        assert found["size"] > weights
        assert found["peak"] <= LIMIT * found["size"]
