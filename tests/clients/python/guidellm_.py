"""guidellm: ten requests, two at a time, from a file of prompts."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scenarios import KEY, MODEL, QUESTION, URL, run, scenario

REQUESTS = 10


@scenario("bench")
def bench():
    folder = Path(tempfile.mkdtemp())
    prompts, report = folder / "prompts.jsonl", folder / "report.json"
    lines = [json.dumps({"prompt": f"{QUESTION} ({number})"}) for number in range(REQUESTS)]
    prompts.write_text("\n".join(lines) + "\n")
    told = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"),
            *("--backend", f"kind=openai_http,target={URL},model={MODEL},api_key={KEY}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", f"kind=json_file,path={prompts}"),
            *("--output", f"kind=json,path={report}"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-2000:]
    [done] = json.loads(report.read_text())["benchmarks"]
    counts = done["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (REQUESTS, 0), counts


run()
