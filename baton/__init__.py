"""Baton's library: engine, model files, text, and modules shared by a fleet's programs.

    from baton import LLM, SamplingParams

    llm = LLM()
    params = SamplingParams(max_tokens=20, temperature=0.0)
    for output in llm.generate(["The sea is", "Once upon a time"], params):
        print(output.text)

``import baton`` is cheap: torch is imported with the first use of ``LLM``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.llm import LLM, Output
    from baton.types.params import SamplingParams

__all__ = ["LLM", "Output", "SamplingParams"]

_MODULES = {
    "LLM": "baton.engine.llm",
    "Output": "baton.engine.llm",
    "SamplingParams": "baton.types.params",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
