"""aiperf: ten streamed chats, two at a time. Its prompts are made with a tokenizer of our own."""

import subprocess
import sys
import tempfile
from pathlib import Path

from scenarios import KEY, MODEL, URL, run, scenario
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

REQUESTS = 10


def tokenizer(folder: Path) -> str:
    """A token for each byte: aiperf's own choice would be fetched from another host."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="a", eos_token="b").save_pretrained(
        str(folder / "tokenizer")
    )
    return str(folder / "tokenizer")


@scenario("bench")
def bench():
    folder = Path(tempfile.mkdtemp())
    told = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("aiperf")), "profile", "-m", MODEL),
            *("--url", URL, "--endpoint-type", "chat", "--streaming", "--api-key", KEY),
            *("--tokenizer", tokenizer(folder), "--ui", "none"),
            *("--request-count", str(REQUESTS), "--concurrency", "2", "--isl", "50", "--osl", "8"),
            *("--output-artifact-dir", str(folder / "report")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-2000:]
    records = (folder / "report" / "profile_export.jsonl").read_text().splitlines()
    assert len(records) == REQUESTS, len(records)


run()
