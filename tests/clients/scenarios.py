"""What a client's file runs with, in its own interpreter: nothing but the standard library.

@scenario("chat")
def chat(): ...

run()   # prints one JSON line for each scenario
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ.get("BATON_URL", "")
BASE = f"{URL}/v1"
KEY = os.environ.get("BATON_KEY", "")
MODEL = os.environ.get("BATON_MODEL", "default")
SENTENCE = "Paris is the capital of France."
QUESTION = "What is the capital of France?"

_SCENARIOS: list[tuple[str, Callable]] = []


def scenario(name: str) -> Callable:
    """Register a scenario."""

    def register(function: Callable) -> Callable:
        _SCENARIOS.append((name, function))
        return function

    return register


def run() -> None:
    """Run all of them, each by itself, and tell of each."""
    for name, function in _SCENARIOS:
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(function())
            else:
                function()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            _tell(name, "fails", f"{type(error).__name__}: {error}"[:400])
        else:
            _tell(name, "works", "")


def _tell(name: str, result: str, why: str) -> None:
    print("@" + json.dumps({"scenario": name, "result": result, "why": why}), flush=True)
