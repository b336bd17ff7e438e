"""Write the project's address into the three pyproject.toml, so that the wheels have it: `repo_url`, `site_url`.

  python maintenance/pages/write_urls.py            writes [project.urls], or removes it where mkdocs.yml has no address
  python maintenance/pages/write_urls.py --check    says which pyproject.toml has not what mkdocs.yml says

Exits with 1 if one is stale.
"""

import argparse
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from maintenance import ROOT
from maintenance.pages.generated import write_or_compare
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, run

NAME = "write_urls"
PROJECTS = ("pyproject.toml", "portproof/pyproject.toml", "sturdyio/pyproject.toml")
LABELS = {"repo_url": "Repository", "site_url": "Documentation"}  # a setting of mkdocs.yml, its label in the metadata


def addresses(root: Path) -> dict[str, str]:
    """{label: address} of those that mkdocs.yml in `root` has; raises UserError for what is no address."""
    settings = yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))
    given = {name: settings[name] for name in LABELS if settings[name]}
    for name, address in given.items():
        if urlsplit(address).scheme not in ("http", "https"):
            raise UserError(f"{name} of mkdocs.yml is {address!r}, which begins with neither http:// nor https://")
    return {LABELS[name]: address for name, address in given.items()}


def with_urls(text: str, urls: dict[str, str]) -> str:
    """The pyproject.toml `text` with these {label: address} as [project.urls]; without that table if there are none."""
    text = re.sub(r"^\[project\.urls\]\n(?:.+\n)*\n", "", text, flags=re.MULTILINE)
    lines = [f"{label} = {json.dumps(address)}\n" for label, address in urls.items()]
    table = "".join(["[project.urls]\n", *lines, "\n"]) if urls else ""
    return re.sub(r"^\[project\]\n(?:(?!\[).*\n)*", lambda project: project[0] + table, text, flags=re.MULTILINE)


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=NAME, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    return parser


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Raises UserError for what is no address."""
    urls = addresses(root)
    texts = {name: with_urls((root / name).read_text(encoding="utf-8"), urls) for name in PROJECTS}
    return write_or_compare(root, texts, ".", args.check)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
