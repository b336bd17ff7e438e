"""What is thorough has a guard that is not; how tests are left out is portproof/tests/test_tiers.py's."""

from markdown_pages import ROOT
from test_tiers import unguarded


def test_every_thorough_test_has_a_guard_that_is_not():
    assert unguarded(ROOT / "tests", ROOT / "portproof" / "tests", ROOT / "sturdyio" / "tests") == []


def test_both_folders_are_collected_at_once():
    """pytest imports files outside of packages by their names alone."""
    here, kit = ({path.name for path in (ROOT / folder).glob("*.py")} for folder in ("tests", "portproof/tests"))
    assert here & kit == {"conftest.py"}
