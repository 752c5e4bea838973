"""The pages of ``docs/reference`` are what ``tests/house/reference.py`` generates."""

import pytest

from tests.house import models_page, reference
from tests.house.imports import ROOT


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_a_reference_page_is_generated_from_the_code(name: str) -> None:
    committed = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert committed == reference.PAGES[name](), "run: python -m tests.house.reference"


def test_the_guide_has_the_families_that_the_code_has() -> None:
    page = (ROOT / "docs" / "guide" / "models.md").read_text(encoding="utf-8")
    assert models_page.families() in page, models_page.families()
