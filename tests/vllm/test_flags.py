"""The flags of `baton serve` are vLLM's: each is an option of its own parser (`make test-vllm`)."""

import json
import subprocess

import pytest

from fleet.cli.vllm_flags import FLAGS, INSTEAD
from tests.vllm.places import PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
OWN = {"--insecure"}  # of Baton
OPTIONS = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps({
    name: action.nargs in ("+", "*")
    for action in parser._actions for name in action.option_strings
}))
"""


def test_every_flag_of_the_table_is_one_of_vllm() -> None:
    done = subprocess.run(
        [PYTHON, "-c", OPTIONS], check=True, capture_output=True, text=True, timeout=240
    )
    options = json.loads(done.stdout.splitlines()[-1])
    names = {name: flag for flag in FLAGS for name in flag.names.split()}
    assert names.keys() - OWN - options.keys() == set()
    assert INSTEAD.keys() - options.keys() == set()
    lists = {name for name, flag in names.items() if flag.nargs == "+"}
    assert {name for name in names.keys() - OWN if options[name]} == lists
