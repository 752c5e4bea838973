"""Every lab: its question, what it needs, and the module that holds its ``run``."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import msgspec

from loadtest.lab.results import Findings


class LabContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a lab is told.

    Attributes:
        quick: Fewer points and repetitions: under two minutes on two cores.
        model: Reference of the model, for labs that run an engine.
        threads: Of torch, for these.
        url: Of the router, for labs that load a fleet; without ``/v1``.
        api_key: An operator's, where the fleet has keys.
    """

    quick: bool = False
    model: str = ""
    threads: int = 2
    url: str = ""
    api_key: str = ""


@dataclass(frozen=True)
class Lab:
    """One question. ``needs``: an engine in a process of its own, or a fleet."""

    name: str
    question: str
    needs: Literal["engine", "fleet"]

    def run(self, context: LabContext) -> Findings:
        """Answer it; an engine's lab imports torch."""
        run: Callable[[LabContext], Findings] = import_module(f"loadtest.lab.{self.name}").run
        return run(context)


LABS = {
    lab.name: lab
    for lab in (
        Lab("capacity", "How many requests fit into the KV pool, and what happens then?", "engine"),
        Lab("prefix", "What does a prompt's known beginning save until the first token?", "fleet"),
        Lab("batching", "What does continuous batching gain over static batches?", "engine"),
        Lab("cancellation", "How soon is everything free when a client hangs up?", "fleet"),
        Lab("chunks", "How large may a chunk of a prompt be before answers stutter?", "engine"),
        Lab("speculation", "Where does n-gram speculation make answers faster?", "engine"),
        Lab("quantisation", "What do fewer bits save, and what do they lose?", "engine"),
        Lab("adapters", "What does a batch of many LoRA adapters cost?", "engine"),
    )
}
