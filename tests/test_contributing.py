"""CONTRIBUTING.md and the licence: what they name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted({name for name in re.findall(r"`([\w./-]+)`", TEXT) if "/" in name or name.endswith((".yml", ".toml"))})


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_there(name):
    assert (ROOT / name).exists() or list(ROOT.glob(f"*/{name}"))


def test_commands_name_what_is_there():
    scripts = re.findall(r"(?:python|sh) ([\w/]+\.(?:py|sh))", TEXT)
    assert len(scripts) > 5 and all((ROOT / script).is_file() for script in scripts)


def test_every_recipe_fits_a_screen():
    recipes = TEXT.split("\n## ")[2:]
    assert len(recipes) == 7 and all(len(recipe.splitlines()) <= 25 for recipe in recipes)


def test_the_licence_is_the_same_everywhere():
    licence = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in licence and b"Copyright 2026 The authors of this project" in licence
    for package in ("portproof", "sturdyio"):
        assert (ROOT / package / "LICENSE").read_bytes() == licence
