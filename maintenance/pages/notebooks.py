"""Each chapter of the tutorial as a Jupyter notebook, made from the page: what is run is a cell, the rest is text.

- Commands are `%%bash` cells, a file that the page writes is a `%%writefile` cell.
- The code of a framework is a `%%program` cell: maintenance/pages/notebook_kernel.py, which the first cell loads, runs
  it in a process of that framework, so that both programs keep their names apart.
- What a page shows as output stays as text under the cell, for a reader to compare. So does code that is not run.

The hooks of mkdocs put the notebooks into the site, in notebooks/LANGUAGE/, and link each chapter to its own.
"""

import re
from urllib.parse import urljoin, urlsplit

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

CHAPTERS = (
    *("environment", "weights", "records", "network", "01_forward", "02_data", "03_metric", "04_loss"),
    *("05_backward", "06_init", "07_train", "08_dist", "deploy"),
)
FENCE = re.compile(
    r"(?:^<!-- (?P<comment>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)\n```$"
    r"(?=(?:\n+```text\n(?P<shown>.*?)\n```$)?)",
    re.DOTALL | re.MULTILINE,
)
LABEL = re.compile(r"\*\*(PyTorch|PaddlePaddle)\*\*\s*\Z")  # the paragraph before the code of a framework
PROGRAMS = {"PyTorch": "torch", "PaddlePaddle": "paddle"}
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
GRID = re.compile(r"^(?:<div class=\"grid\" markdown>|</div>)\n\n?", re.MULTILINE)
SITE_FROM_NOTEBOOK = "../../"  # where the site has no address: a notebook lies in notebooks/LANGUAGE/

ABOUT = {
    "en": (
        "This notebook is a chapter of the tutorial, made from its page. The next cell finds the project in this "
        "folder or above it, or else clones it, and installs what the project needs, as `sh shell/setup.sh` does: the "
        "first time it fetches 1 GB and installs 3 GB, or 3 GB and 7 GB where PyTorch comes with CUDA. Run it first. "
        "`%%bash` types commands in the project's folder. `%%program torch` runs code in a process of the reference's "
        "program, `%%program paddle` in one of the port's."
    ),
    "zh": (
        "本 notebook 由教程的一章生成。下一个单元在当前文件夹及其上级文件夹中查找本项目，"
        "找不到就克隆一份，再像 `sh shell/setup.sh` 那样安装项目所需的内容：首次运行要下载 1 GB，安装 3 GB，"
        "PyTorch 带有 CUDA 时是 3 GB 和 7 GB。"
        "请先运行这个单元。`%%bash` 在项目文件夹中执行命令。"
        "`%%program torch` 在参考代码的进程中运行代码，`%%program paddle` 在移植版的进程中运行代码。"
    ),
}
SET_UP = """\
import os
import subprocess
from pathlib import Path

kernel = "maintenance/pages/notebook_kernel.py"
here = Path.cwd()
folders = [here, *here.parents, here / "mobilenetv3"]
project = next((folder for folder in folders if (folder / kernel).is_file()), None)
if project is None:
    {otherwise}
os.chdir(project)  # where a kernel looks for modules, too
%load_ext maintenance.pages.notebook_kernel"""
CLONE = """\
project = folders[-1]
    subprocess.run(["git", "clone", "--depth", "1", "{repository}", str(project)], check=True)"""
NO_ADDRESS = 'raise FileNotFoundError("put this notebook into the folder of the project, or into one of its folders")'


def notebook(markdown: str, page: str, repository: str, site: str) -> nbformat.NotebookNode:
    """The notebook of a page such as `en/01_forward`, with links to the site at that address.

    `repository` is where the project is cloned from; both addresses may be "", where nobody knows them.
    """
    otherwise = CLONE.format(repository=repository) if repository else NO_ADDRESS
    cells = [new_markdown_cell(ABOUT[page[:2]]), new_code_cell(SET_UP.format(otherwise=otherwise))]
    text, end = "", 0

    def prose(part: str) -> str:
        return LINK.sub(lambda link: _address(link[0], page, site), GRID.sub("", part))

    for fence in FENCE.finditer(markdown):
        before = markdown[end : fence.start()]
        text, end = text + prose(before), fence.end()
        if magic := _magic(before, fence["comment"] or "", fence["language"], fence["shown"] or ""):
            cells += [new_markdown_cell(text.strip()), new_code_cell(f"{magic}\n{fence['code']}")]
            text = ""
        else:
            text += re.sub(r"\A<!-- from: (\S+) -->\n", r"`\1`:\n\n", fence[0])
    cells.append(new_markdown_cell((text + prose(markdown[end:])).strip()))
    cells = [cell for cell in cells if cell.source]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # else at random
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def link_line(page: str, base: str) -> str:
    """What a chapter says of its notebook: a link to load it down and, with a base address, one that opens it there."""
    download, run = {
        "en": ("This chapter as a notebook", "Run it online"),
        "zh": ("本章的 notebook", "在线运行"),
    }[page[:2]]
    file = f"{page}.ipynb"
    links = f'[{download}](../notebooks/{file}){{ download="{file.split("/")[1]}" }}'
    return f"{links} · [{run}]({base}{file})" if base else links


def status(shown: list[str]) -> int:
    """The exit status that a shown output means: 1 where a check fails, 2 where nothing could be checked, else 0."""
    if any(re.match(r"[\w.]+: error: |REFUSED ", line) for line in shown):
        return 2
    return int(any(re.match(r"FAIL \S+: |.*: skipped: ", line) for line in shown))


def _magic(before: str, comment: str, language: str, shown: str) -> str:
    """The first line of a block's cell, "" for a block that is not run; `before` is the page up to it."""
    kind, _, rest = comment.partition(": ")
    if kind == "write":
        return f"%%writefile {rest}"
    if kind == "run":
        return f"%%program {' '.join(PROGRAMS.values())}"
    if language in ("shell", "bash") and kind != "not run":
        return "%%bash --no-raise-error" if status(shown.splitlines()) else "%%bash"
    if (label := LABEL.search(before)) and not comment:
        return f"%%program {PROGRAMS[label[1]]}"
    return ""


def _address(link: str, page: str, site: str) -> str:
    """Where a link of the page leads from a notebook."""
    target = urljoin(f"{page}.md", link)
    if urlsplit(target).scheme:
        return target
    return (site or SITE_FROM_NOTEBOOK) + re.sub(r"(?:/index)?\.md(?=#|$)", "/index.html", target)
