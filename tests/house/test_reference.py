"""The pages of ``docs/reference`` are what ``tests/house/reference.py`` generates."""

import pytest

from tests.house import reference


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_a_reference_page_is_generated_from_the_code(name: str) -> None:
    committed = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert committed == reference.PAGES[name](), "run: python -m tests.house.reference"
