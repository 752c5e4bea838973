"""The file by which workers of a host lend each other cores, where it cannot be had."""

from pathlib import Path

import pytest

from baton.engine.cpu import build
from baton.engine.settings import EngineSettings


def test_a_table_that_another_user_has_taken_costs_the_loan_of_cores_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name is known, so any user of the host could keep all engines of others from starting."""
    table = tmp_path / "table"
    table.mkdir()
    monkeypatch.setattr(build, "cores_file", lambda: table)
    settings = EngineSettings(model="m", threads=1, lends_cores=True)
    assert build._shared_cores(settings) is None
    assert "cannot lend idle cores" in caplog.text
