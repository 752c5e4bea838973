"""Table of labs: question, requirements, and the module with its ``run``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Literal

import typer

from baton.config.fleet_file import DEFAULT_MODEL
from loadtest.lab.results import Findings


@dataclass(frozen=True, kw_only=True)
class LabContext:
    """Options of a lab; ``url`` and ``api_key`` are those of the fleet that it uses."""

    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Measure fewer points: 2 minutes on two cores; canary 3, split 5."
        ),
    ] = False
    url: Annotated[
        str, typer.Option(help="Router of the fleet to use. Default: the local fleet.")
    ] = ""
    api_key: Annotated[
        str,
        typer.Option(envvar="OPENAI_API_KEY", help="Operator's API key, if the fleet has keys."),
    ] = ""
    model: Annotated[
        str, typer.Option(help="Model reference, for labs with an engine of their own.")
    ] = DEFAULT_MODEL
    workers: Annotated[
        int, typer.Option(min=2, help="split: workers of the emulated fleet that it starts.")
    ] = 4
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of that engine. Default: cores, at most 2.")
    ] = None


@dataclass(frozen=True)
class Lab:
    """Experiment on one question. ``needs`` an engine in its own process, or a fleet.

    Attributes:
        own_fleet: Starts an emulated fleet unless one is given, since the lab changes it.
        timings: Timing of each model of that fleet; empty: it has one model.
    """

    name: str
    question: str
    needs: Literal["engine", "fleet"]
    own_fleet: bool = False
    timings: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> Callable[[LabContext], Findings]:
        """Import the lab. Labs with an engine import torch, which takes seconds."""
        run: Callable[[LabContext], Findings] = import_module(f"loadtest.lab.{self.name}").run
        return run

    def run(self, context: LabContext) -> Findings:
        """Import the lab, and run it."""
        return self.load()(context)


LABS = {
    lab.name: lab
    for lab in (
        Lab("chunks", "How large may prompt chunks be before responses stutter?", "engine"),
        Lab("speculation", "Where does n-gram speculation speed up responses?", "engine"),
        Lab(
            "split",
            "Which split into prefill and decode is best for a load, and does the planner find it?",
            "fleet",
            own_fleet=True,
        ),
        Lab(
            "canary",
            "How soon is a bad version of a model rolled back, and is a good one kept?",
            "fleet",
            own_fleet=True,
            timings={"chat@1": "h100-70b", "chat@2": "h100-70b", "chat@3": "epyc-135m"},
        ),
    )
}
