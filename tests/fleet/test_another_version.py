"""Commands of one version beside a supervisor of another, as after an upgrade or a way back."""

import os
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from baton.config.fleet_file import FleetConfig
from fleet.cli.lifecycle import planned
from fleet.cli.main import app
from fleet.local import state as fleet_state
from fleet.process_key import ProcessKey
from tests.fleet.test_state import home, state

__all__ = ["home"]

LATER = '{"pools": {"key_of_a_later_version": 1}}'


@pytest.fixture
def running(home: Path) -> fleet_state.FleetState:
    """The state that a later version has written, whose Redis is away."""
    me = ProcessKey.of(os.getpid())
    assert me is not None
    later = msgspec.structs.replace(state(me, home), config_json=LATER)
    fleet_state.save(later)
    return later


@pytest.mark.usefixtures("running")
def test_orders_need_no_key_of_the_file() -> None:
    shown = CliRunner().invoke(app, ["nodes"])
    assert shown.exit_code == 1
    assert "the controller cannot be reached" in shown.output, shown.exception


def test_reconcile_says_that_versions_differ(
    running: fleet_state.FleetState, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        planned(running, FleetConfig())
    told = " ".join(capsys.readouterr().err.split())
    assert "the supervisor of f runs another version of Baton" in told
