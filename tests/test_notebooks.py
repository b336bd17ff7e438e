"""The chapters as notebooks: their cells are what the tests of the tutorial run, and no text of a page is lost.

The shortest chapters, those of RUN, run here in a kernel, from the first cell to the last, in some 3 minutes:
test_notebook_runs. 05, 07, 08 and deploy would take 10 minutes more. They need no run of their own, since

- test_cells_are_what_the_page_test_runs shows that their cells are the blocks that the tests of the tutorial run, and
  test_all_of_the_page_is_there_in_its_order that they come in the same order;
- their first cell is that of the others, so that they run in the same folder and environment;
- test_what_is_not_run_has_no_other_kind_of_cell.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import test_tutorial
from markdown_pages import ROOT, blocks, links
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from nbclient import NotebookClient
from nbformat import NotebookNode
from run_page_code import FRAMEWORKS, program

from maintenance.pages import notebook_kernel, site_hooks
from maintenance.pages.notebooks import CHAPTERS, notebook, status

RUN = (*("environment", "weights", "records", "network"), *("01_forward", "02_data", "03_metric", "04_loss", "06_init"))
PAGES = [f"{language}/{chapter}" for language in ("en", "zh") for chapter in CHAPTERS]
SITE = "https://example.org/tutorial/"
REPOSITORY = "https://example.org/owner/project"


def of_page(page: str, repository: str = "", site: str = "") -> NotebookNode:
    return notebook((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), page, repository, site)


def code(book: NotebookNode) -> list[str]:
    return [cell.source for cell in book.cells if cell.cell_type == "code"]


def cells(book: NotebookNode, magic: str) -> list[tuple[list[str], str]]:
    """The arguments and the text of each cell that begins with the magic."""
    split = (source.partition("\n") for source in code(book))
    return [(first.split()[1:], rest) for first, _, rest in split if first.split()[0] == f"%%{magic}"]


def test_every_chapter_of_the_tutorial_is_one():
    (table,) = (block for block in blocks("docs/en/index.md") if block.kind == "table")
    assert [link for row in table.cells[2:] for link in links(row[0])] == [f"{name}.md" for name in CHAPTERS]


@pytest.mark.parametrize("page", PAGES)
def test_is_valid_and_always_the_same(page):
    book = of_page(page)
    nbformat.validate(book)
    assert nbformat.writes(book) == nbformat.writes(of_page(page))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_code_of_both_languages_is_the_same(chapter):
    assert code(of_page(f"en/{chapter}")) == code(of_page(f"zh/{chapter}"))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_cells_are_what_the_page_test_runs(chapter, tmp_path, monkeypatch):
    """All of it, and nothing else but the set-up: commands with whether they may fail, files, programs."""
    name, book, ran = f"docs/en/{chapter}.md", of_page(f"en/{chapter}"), []
    monkeypatch.setattr(
        test_tutorial, "run_block", lambda _, lines, shown: ran.append((lines, status(shown or []) > 0))
    )
    for language in ("shell", "bash"):
        test_tutorial.run_page(tmp_path, name, language)
    typed = [(rest.split("\n"), "--no-raise-error" in arguments) for arguments, rest in cells(book, "bash")]
    assert sorted(typed) == sorted(ran)  # their order is that of the text
    written = {arguments[0]: rest + "\n" for arguments, rest in cells(book, "writefile")}
    assert written == {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    for framework in FRAMEWORKS:
        own = [rest for arguments, rest in cells(book, "program") if framework in arguments]
        assert "\n\n".join(own) == program(name, framework)
    assert len(code(book)) == 1 + sum(len(cells(book, magic)) for magic in ("bash", "writefile", "program"))


def lines(text: str) -> list[str]:
    """Those that a reader sees, without links and magics; a comment that names a code's file is seen in a notebook."""
    text = re.sub(r"^<!-- from: (\S+) -->$", r"`\1`:", text, flags=re.MULTILINE)
    hidden = re.compile(r"\s*$|```\w*$|<!-- .* -->$|<div class=\"grid\" markdown>$|</div>$|%%\w+ ?[\w. -]*$")
    return [re.sub(r"\]\([^)]*\)", "]", line) for line in text.splitlines() if not hidden.match(line)]


@pytest.mark.parametrize("page", PAGES)
def test_all_of_the_page_is_there_in_its_order(page):
    book = of_page(page)
    shown = lines((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    assert lines("\n".join(cell.source for cell in book.cells[2:])) == shown
    texts = [cell.source for cell in book.cells if cell.cell_type == "markdown"]
    assert all(text.count("```") % 2 == 0 and "<div" not in text for text in texts)


@pytest.mark.parametrize("site", ["", SITE])
@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_the_site(page, site):
    """A page of the site is one of docs/; where the site has no address, links are from the notebook's place in it."""
    texts = [cell.source for cell in of_page(page, site=site).cells if cell.cell_type == "markdown"]
    found = [link for text in texts for link in links(text) if site or not link.startswith("http")]
    own = [link.removeprefix(site or "../../").partition("#")[0] for link in found if link.startswith(site or "../../")]
    assert len(own) > 3 and (site or len(own) == len(found))
    for path in own:
        folder = path.removesuffix("/index.html")
        sources = [path, f"{folder}.md", f"{folder}/index.md"] if path != folder else [path]
        assert any((ROOT / "docs" / source).is_file() for source in sources), path


@pytest.fixture
def config() -> MkDocsConfig:
    """The site's, with the addresses that the project does not have yet."""
    config = load_config(str(ROOT / "mkdocs.yml"), repo_url=REPOSITORY, site_url=SITE)
    config.plugins._current_plugin = "the hooks"
    return config


def test_site_has_the_notebooks(config):
    files = site_hooks.on_files(Files([]), config)
    content = {file.src_uri: file.content_string for file in files}
    assert content.keys() == {f"notebooks/{page}.ipynb" for page in PAGES}
    for page in PAGES:
        book = nbformat.reads(content[f"notebooks/{page}.ipynb"], as_version=4)
        assert book == of_page(page, REPOSITORY, SITE)


@pytest.mark.parametrize("base", ["", "https://example.org/open/notebooks/"])
def test_a_chapter_links_to_its_notebook(config, base):
    config.extra["notebook_base"] = base

    def links_of(page: str) -> list[str]:
        at = SimpleNamespace(url=f"{page}/", file=SimpleNamespace(src_uri=f"{page}.md"))
        markdown = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        text = site_hooks.on_page_markdown(markdown, at, config, Files([]))
        return [link for link in links(text) if link.endswith(".ipynb")]

    for page in PAGES:
        assert links_of(page) == [f"../notebooks/{page}.ipynb", f"{base}{page}.ipynb"][: 2 if base else 1]
    assert links_of("en/train") == []


def set_up(folder: Path, repository: str) -> subprocess.CompletedProcess:
    """The first cell's search for the project, run in the folder; it prints what it has found."""
    search = code(of_page("en/01_forward", repository))[0].partition("os.chdir")[0]
    command = [sys.executable, "-c", f"{search}\nprint(project)"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_set_up_finds_the_project_or_clones_it(tmp_path):
    origin, elsewhere = tmp_path / "origin", tmp_path / "elsewhere"
    kernel = origin / "maintenance" / "pages" / "notebook_kernel.py"
    kernel.parent.mkdir(parents=True)
    elsewhere.mkdir()
    kernel.touch()
    git = ["git", "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    assert set_up(kernel.parent, "").stdout.strip() == str(origin)
    without = set_up(elsewhere, "")
    assert without.returncode == 1 and "put this notebook into the folder of the project" in without.stderr
    for _ in range(2):  # the second time it is there
        found = set_up(elsewhere, f"file://{origin}")
        assert found.stdout.strip() == str(elsewhere / "mobilenetv3"), found.stderr


@pytest.fixture
def processes(monkeypatch) -> dict[str, subprocess.Popen]:
    """The programs of a kernel that stands in the project's folder and has set its environment up."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setattr(notebook_kernel, "PROCESSES", {})
    yield notebook_kernel.PROCESSES
    for process in notebook_kernel.PROCESSES.values():
        process.kill()
        process.wait()


def test_programs_keep_their_names_apart_and_between_cells(processes, capfd):
    notebook_kernel.program("torch paddle", "x = 1\nprint('a', end='')")
    notebook_kernel.program("torch", "x += 1")
    notebook_kernel.program("torch paddle", "print(x)")
    assert capfd.readouterr() == ("aa2\n1\n", "")
    with pytest.raises(RuntimeError, match="the program of torch has raised"):
        notebook_kernel.program("torch", "y = 3\nraise SystemExit(0)")
    printed = capfd.readouterr().out
    assert "SystemExit: 0" in printed and '"<cell 4>", line 2' in printed and "raise SystemExit(0)" in printed
    notebook_kernel.program("torch", "print(x, y)")
    assert capfd.readouterr().out == "2 3\n"


def test_a_program_that_has_died_begins_anew(processes, capfd, monkeypatch):
    notebook_kernel.program("torch", "x = 1")
    with pytest.raises(RuntimeError, match="the program of torch has ended with exit status 3"):
        notebook_kernel.program("torch", "import os; os._exit(3)")
    notebook_kernel.program("torch", "x = 2")
    first = processes["torch"]

    def interrupted(*_) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(notebook_kernel, "_execute", interrupted)
        notebook_kernel.program("torch", "x = 3")
    assert first.poll() is not None
    with pytest.raises(RuntimeError, match="has raised"):
        notebook_kernel.program("torch", "print(x)")
    assert "NameError" in capfd.readouterr().out


def test_the_projects_environment_comes_first(tmp_path, monkeypatch):
    (tmp_path / "shell").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which is put back
    (tmp_path / "shell" / "setup.sh").write_text("echo /somewhere/bin/python")
    magics = []
    notebook_kernel.load_ipython_extension(SimpleNamespace(register_magic_function=lambda *magic: magics.append(magic)))
    assert magics == [(notebook_kernel.program, "cell")]
    assert os.environ["PATH"].split(os.pathsep)[0] == "/somewhere/bin"
    (tmp_path / "shell" / "setup.sh").write_text("exit 2")
    with pytest.raises(subprocess.CalledProcessError):
        notebook_kernel.load_ipython_extension(SimpleNamespace())


def test_what_is_not_run_has_no_other_kind_of_cell():
    def kinds(chapters: Iterable[str]) -> set[str]:
        sources = (source for chapter in chapters for source in code(of_page(f"en/{chapter}")))
        return {re.match("%%writefile|.*", source)[0] for source in sources}

    assert kinds(CHAPTERS) == kinds(RUN)


@pytest.mark.thorough("one of them", but="environment")
@pytest.mark.parametrize("chapter", RUN)
def test_notebook_runs(chapter, tmp_path):
    """In a kernel that starts below the project's folder; each command prints what the page shows.

    A kernel has two streams and not the order of both: what is shown is on stdout, or ends on stderr.
    """
    project, book = test_tutorial.copied_project(tmp_path / "project"), of_page(f"en/{chapter}")
    below = project / "site" / "notebooks" / "en"
    below.mkdir(parents=True)
    client = NotebookClient(book, timeout=300, resources={"metadata": {"path": str(below)}})
    client.execute(env=test_tutorial.environment(project))
    shown_after = [
        (cell.outputs, shown[1].split("\n"))
        for cell, after in pairwise(book.cells)
        if cell.source.startswith("%%bash") and (shown := re.match(r"```text\n(.*?)\n```", after.source, re.DOTALL))
    ]
    assert len(shown_after) == sum(cell.source.count("```text") for cell in book.cells)
    for outputs, shown in shown_after:
        out, err = (
            "".join(output.text for output in outputs if output.get("name") == name).splitlines()
            for name in ("stdout", "stderr")
        )
        assert "" in (test_tutorial.mismatch(shown, out), test_tutorial.mismatch(shown, out + err)), (out, err)
