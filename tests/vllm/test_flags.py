"""The flags of `baton serve` are vLLM's: each is an option of its own parser (`make test-vllm`)."""

import json
import subprocess

import pytest

from fleet.cli.vllm_flags import FLAGS, INSTEAD, FlagError, keys_of
from tests.vllm.places import PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
OWN = {"--insecure"}  # of Baton
SAME = {
    "max_context_tokens": [
        *(
            ["--max-model-len", word]
            for word in ("8k", "8K", "1.5k", "1g", "4096", "1.5K", "k", "")
        ),
        ["--max_model_len=4096"],
    ],
    "max_step_tokens": [["--max-num-batched-tokens", "8K"], ["--max_num_batched_tokens=2m"]],
    "max_batch_requests": [["--max-num-seqs", "16"], ["--max-num-seqs", "1k"]],
    "port": [["--port", "8k"], ["--port=9", "--port", "10"]],
    "kv_blocks_per_worker": [["--num_gpu_blocks_override", "7"], ["--num-gpu-blocks-override=1k"]],
    "served_model_name": [["--served_model_name", "a", "b"], ["--served-model-name=a"]],
    "tensor_parallel_size": [["-tp=2"], ["-tp", "2"], ["--tensor_parallel_size=2"], ["-tp2"]],
    "adapters": [["--lora-modules", '{"name":"a","path":"/p","base_model_name":"b"}', "c=/d"]],
}
OF_VLLM = {
    "max_context_tokens": "max_model_len",
    "max_step_tokens": "max_num_batched_tokens",
    "max_batch_requests": "max_num_seqs",
    "kv_blocks_per_worker": "num_gpu_blocks_override",
    "adapters": "lora_modules",
}
OF_SOME = {"--no-enable-lora", "--disable-lora"}  # the first name until 0.32, the second since 0.33
PARSER = """
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # since 0.33
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
"""
PARSED = f"""{PARSER}
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
found = []
for name, words in json.load(sys.stdin):
    try:
        value = getattr(parser.parse_args(["m", *words]), name)
    except (SystemExit, ValueError):
        value = None
    if name == "lora_modules":
        value = {{"load": {{each.name: each.path for each in value}}}}
    found.append(value)
print(json.dumps(found))
"""
OPTIONS = f"""{PARSER}
import json
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps({{
    name: action.nargs in ("+", "*")
    for action in parser._actions for name in action.option_strings
}}))
"""


def test_every_flag_of_the_table_is_one_of_vllm() -> None:
    done = subprocess.run(
        [PYTHON, "-c", OPTIONS], check=True, capture_output=True, text=True, timeout=240
    )
    options = json.loads(done.stdout.splitlines()[-1])
    names = {name: flag for flag in FLAGS for name in flag.names.split()}
    assert names.keys() - OWN - OF_SOME - options.keys() == set()
    assert INSTEAD.keys() - options.keys() == set()
    lists = {name for name, flag in names.items() if flag.nargs == "+"}
    assert {name for name in names.keys() - OWN if options.get(name)} == lists


def of_baton(key: str, words: list[str]) -> object:
    try:
        _, keys, _ = keys_of(["m", *words], by_vllm=False)
    except FlagError:
        return None
    return keys["pools"]["tensor_parallel"] if key == "tensor_parallel_size" else keys[key]


def test_words_of_flags_mean_what_they_mean_to_vllm() -> None:
    cases = [(key, words) for key, cases in SAME.items() for words in cases]
    asked = json.dumps([(OF_VLLM.get(key, key), words) for key, words in cases])
    done = subprocess.run(
        [PYTHON, "-c", PARSED], input=asked, check=True, capture_output=True, text=True, timeout=240
    )
    meant = json.loads(done.stdout.splitlines()[-1])
    assert [of_baton(*case) for case in cases] == meant
    assert 1 < meant.count(None) < len(meant) / 2
