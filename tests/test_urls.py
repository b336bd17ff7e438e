"""maintenance/pages/write_urls.py: the address that mkdocs.yml has is in the metadata of the three packages' wheels."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_pages import ROOT

from maintenance.pages.write_urls import PROJECTS, get_args_parser, main
from sturdyio.cli import UserError

REPOSITORY, SITE = "https://example.org/owner/project", "https://example.org/tutorial/"
WRITE, CHECK = (get_args_parser().parse_args(flags) for flags in ([], ["--check"]))
METADATA = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"


def test_each_pyproject_says_what_mkdocs_yml_says():
    assert main(CHECK) == 0, "run 'python maintenance/pages/write_urls.py'"


@pytest.fixture
def copy(tmp_path) -> Path:
    """The files that the metadata are made from."""
    for name in ("mkdocs.yml", *PROJECTS):
        for file in (name, name.replace("pyproject.toml", "README.md"), name.replace("pyproject.toml", "LICENSE")):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / file)
    set_address(tmp_path, "", "")
    main(WRITE, tmp_path)
    return tmp_path


def set_address(folder: Path, repository: str, site: str) -> None:
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if not line.startswith(("repo_url:", "site_url:"))]
    (folder / "mkdocs.yml").write_text("\n".join([*others, f'repo_url: "{repository}"', f'site_url: "{site}"']))


@pytest.mark.parametrize("repository", ["", REPOSITORY])
@pytest.mark.parametrize("site", ["", SITE])
def test_the_wheels_have_the_address(copy, repository, site):
    before = {name: (copy / name).read_text(encoding="utf-8") for name in PROJECTS}
    set_address(copy, repository, site)
    is_set = bool(repository or site)
    assert main(CHECK, copy) == is_set
    assert main(WRITE, copy) == main(CHECK, copy) == 0
    expected = [f"Project-URL: Repository, {repository}"] if repository else []
    expected += [f"Project-URL: Documentation, {site}"] if site else []
    for name in PROJECTS if is_set else ():
        folder = (copy / name).parent
        subprocess.run([sys.executable, "-c", METADATA], cwd=folder, capture_output=True, check=True)
        (metadata,) = folder.glob("*.dist-info/METADATA")
        lines = metadata.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if line.startswith("Project-URL: ")] == expected
    set_address(copy, "", "")
    assert main(WRITE, copy) == 0
    assert {name: (copy / name).read_text(encoding="utf-8") for name in PROJECTS} == before


def test_what_is_no_address_is_refused(copy):
    set_address(copy, "example.org/owner/project", "")
    with pytest.raises(UserError, match="repo_url of mkdocs.yml is 'example.org/owner/project', which begins"):
        main(WRITE, copy)
