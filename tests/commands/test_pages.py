"""Every figure that a command shows stands where it belongs, in its unit."""

import pytest
from pages import FOLDER, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_page_shows_every_figure_of_its_report(name):
    """`python tests/commands/pages.py` writes them again, to be read before they are committed."""
    assert page(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_page_has_its_text():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(PAGES)
