"""What mkdocs does to the pages beyond Markdown (`hooks:` in mkdocs.yml), so that their Markdown stays plain.

- Codes of several frameworks that follow one another are set side by side, each under its framework's name, and the
  words in which the first two differ are marked, but for the frameworks' own names.
- The rungs in the picture of the ladder are links to their chapters.
- The drawings of the network stand in the page itself, so that they take its colours and their text can be searched.
- Formulas between dollar signs, as GitHub shows them too, are MathML, for which a browser needs nothing else.
- The cells of some tables name their columns, so that a phone can show each row as a card.
- The links to the repository, in the header and on the front pages, are to the checkout's `origin`; the front pages'
  `git clone` names it.
- The sections of a long page are folded under their headings: it is shown as a list of what it has. Some pages are long
  on a phone alone; there docs/site.js folds all but the first section.
- The search has a name for those who hear the page.
- Each chapter of the tutorial leads to itself as a notebook, and where `extra: notebook_base` is set, to one that runs.
- The header, and a link of each page, lead to the same page in the other language, and docs/site.js to the same place
  there: the headings of a Chinese page have the ids of the English page's.
- Each page has its first paragraph as a description.
- Each language has a search of its own, in prose alone: code would fill the previews. What programs wrote comes last,
  and first what search_words.yaml names. search_states.js corrects the library that searches.
"""

import difflib
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from html import escape, unescape
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import yaml
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import ConfigurationError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink
from mkdocs.utils import get_relative_url

from maintenance.pages.notebooks import CHAPTERS, link_line, notebook

SWITCH = re.compile(r"^\[(?:English|中文)\]\(.*\)$", re.MULTILINE)
CARDS = {"api_differences.md": "catalogue", "off_by_a_little.md": "cases"}  # the class of a page's tables
FRONT = {"index.md": "Repository", "index_cn.md": "代码仓库"}
# A code with a name: the comment that says where it is quoted from, or the framework in bold.
FRAMEWORKS = {"mobilenetv3_ref": "PyTorch", "mobilenetv3_paddle": "PaddlePaddle"}
QUOTED = rf"<!-- from: (?P<package>{'|'.join(FRAMEWORKS)})/(?P<file>\S+) -->\n"
BOLD = r"\*\*(?P<name>PyTorch|PaddlePaddle|MindSpore)\*\*\n\n(?:<!-- write: \S+ -->\n)?"
CODE = rf"(?:{QUOTED}|{BOLD})```python\n(?:(?!```)[^\n]*\n)*```"  # one code, and no text behind it
UNNAMED = re.sub(r"\?P<\w+>", "?:", CODE)
SEVERAL = re.compile(rf"(?:<div class=\"grid\" markdown>\n\n)?({UNNAMED}(?:\n\n{UNNAMED})+)(?:\n\n</div>)?", re.DOTALL)
PAIR = re.compile(r'(<div class="codes">.*?<code>)(.*?)(</code>.*?<code>)(.*?)(</code>)', re.DOTALL)
DRAWN = re.compile(r'<img alt="(?P<alt>[^"]*)" src="[^"]*images/(?P<name>(?:network|run)_\w+\.svg)" ?/?>')
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# GitHub needs blanks around a formula, Chinese does not beside a comma.
BLANKS = re.compile("(?<=</math>) (?=[，。、：；）])|(?<=[，。、：；（]) (?=<math )")
LANGUAGES = {"en": "English", "zh": "中文"}
NOTEBOOKS = [f"{language}/{chapter}" for language in LANGUAGES for chapter in CHAPTERS]
SEARCH_WORDS = Path(__file__).with_name("search_words.yaml")
SEARCH_STATES = Path(__file__).with_name("search_states.js")
GENERATED = {
    "benchmark",
    "fault_gallery",
    "exported_faults",
    "converted_ports",
    "library_pairs",
    "guide_map",
    "versions",
}
WRITTEN_BY_PROGRAMS = 0.2  # in search, of 1: tables of names and figures
LONGEST = 200  # characters of a description
PARAGRAPH = re.compile(r"<p>((?:(?!</p>|hreflang).)*)</p>", re.DOTALL)  # but for the link to the other language
SENTENCE_END = re.compile(r"[.!?](?= )|[。！？]")
WHOLE_WORDS = re.compile(r".*(?=[ ，、；：])")
# The pages whose sections are folded, and the level of the sections' headings; then those that are on a phone alone.
FOLDED = {"faq/index.md": 3, "faq/": 2, "api.md": 3, "fault_gallery.md": 2, "own_project.md": 2, "project.md": 2}
FOLDED_ON_A_PHONE = {
    "01_forward.md": 2,
    "network.md": 2,
    "own_model.md": 2,
    "off_by_a_little.md": 3,
    "api_differences.md": 2,
    "converted_ports.md": 2,
    "05_backward.md": 2,
    "records.md": 2,
    "benchmark.md": 2,
    "deploy.md": 2,
    "versions.md": 2,
}
# What may stand before a heading and belongs to its section: a place to link to, and the frame of a part of the API.
BEFORE_HEADING = r'(?:<p><a id="[^"]*"></a></p>\s*|<div class="doc doc-object[^"]*">\s*)?'
SEARCH = {"en": "Search", "zh": "搜索"}
IN_PRE = re.compile(r"<pre>.*?</pre>", re.DOTALL)
# What the drawings say, longer words before those that they contain.
IN_CHINESE = {
    "resolution": "分辨率",
    "input → expanded → output": "输入 → 扩展 → 输出",
    "million multiply-adds": "百万次乘加",
    "multiply-adds": "乘加",
    "parameters, ": "个参数，",
    "parameters": "参数",
    "channels": "通道数",
    "pooled": "池化后",
    "linear": "线性层",
    "residual": "残差",
    "depthwise convolution": "逐通道卷积",
    "convolution": "卷积",
    "average over all places": "对所有位置取平均",
    "batch norm": "BatchNorm",
    "last block": "最后一个 block",
    "input": "输入",
    "output": "输出",
    "largest difference": "最大差异",
    "running statistics": "滑动统计量",
    "item, in the order of execution": "比较项，按执行顺序",
    "top-1 in training": "训练 top-1",
}
SAID = "|".join(rf"(?<![\w.]){word}\b" for word in IN_CHINESE)
# Highlighted code is tags, blanks, comments, which say other things anyway, and words.
WORDS = re.compile(r'(<span class="c1">.*?</span>|<[^>]+>|\s+)')
# That the two are of two frameworks is no difference: a mark on every line would hide those that matter.
FRAMEWORK = re.compile(r"\b(?:torch|paddle|mobilenetv3_ref|mobilenetv3_paddle)\b")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.repo_url = config.repo_url or repository(_origin(Path(config.config_file_path).parent))
    config.repo_name = urlsplit(config.repo_url).path.strip("/")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in NOTEBOOKS:
        markdown = (Path(config.docs_dir) / f"{page}.md").read_text(encoding="utf-8")
        content = nbformat.writes(notebook(markdown, page, config.repo_url or "", config.site_url or ""))
        files.append(File.generated(config, f"notebooks/{page}.ipynb", content=content + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    links = "{ hreflang=en }" if _language(page) == "zh" else "{ hreflang=zh }"
    if config.repo_url and page.file.src_uri in FRONT:
        links += f" · [{FRONT[page.file.src_uri]}]({config.repo_url})"
        markdown = markdown.replace("git clone REPOSITORY ", f"git clone {config.repo_url} ")
    if (name := page.file.src_uri.removesuffix(".md")) in NOTEBOOKS:
        links += f" · {link_line(name, config.extra.get('notebook_base', ''))}"
    markdown = SWITCH.sub(lambda switch: switch[0] + links, markdown, count=1)
    return SEVERAL.sub(lambda codes: f'<div class="codes" markdown>\n\n{_named(codes[1])}\n\n</div>', markdown)


def on_page_context(context: dict, page: Page, config: MkDocsConfig, nav: Navigation) -> dict:
    """The header's switch of language leads to the same page, and the other page is named to search engines.

    The search has read the page by now: what is folded is found under its heading.
    """
    folder, _, rest = page.url.partition("/")
    is_front = folder not in LANGUAGES
    links = {"en": ".", "zh": "index_cn/"} if is_front else {language: f"{language}/{rest}" for language in LANGUAGES}
    config.extra["alternate"] = [
        {"name": name, "lang": language, "link": links[language]} for language, name in LANGUAGES.items()
    ]
    page.content = _folded(page.content, page.file.src_uri.partition("/")[2])
    return context


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    page.meta.setdefault("description", escape(description(html)))
    if _language(page) == "zh":
        html = _with_ids_of_the_english(html, page, files)
    html = PAIR.sub(_marked, html)
    kind = CARDS.get(page.file.name + ".md", "")
    html = re.sub(r"<table>.*?</table>", lambda table: _labelled(table[0], kind), html, flags=re.DOTALL)
    html = DRAWN.sub(lambda image: _drawn(image, page, config), html)
    html = BLANKS.sub("", FORMULA.sub(_set, html))
    return re.sub(r'<p><img [^>]*images/ladder\.svg"[^>]*></p>', lambda _: _ladder(page, config), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    base = get_relative_url(f"{_language(page)}/", page.url).rstrip("/")
    return _with_search(output, _language(page), base)


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """That there is no such page is said by a template, in English."""
    return _with_search(output, "en", urlsplit(config.site_url or "/").path.rstrip("/") + "/en")


def on_post_build(config: MkDocsConfig) -> None:
    """An index for each language, instead of the whole one; and the searcher, corrected."""
    site = Path(config.site_dir)
    (searcher,) = site.glob("assets/javascripts/workers/search.*.min.js")
    with searcher.open("a", encoding="utf-8") as file:
        file.write(SEARCH_STATES.read_text(encoding="utf-8"))
    whole = site / "search" / "search_index.json"
    index = json.loads(whole.read_text(encoding="utf-8"))
    whole.unlink()
    for language, words in yaml.safe_load(SEARCH_WORDS.read_text(encoding="utf-8")).items():
        prefix = f"{language}/"
        docs = [
            doc | {"location": doc["location"].removeprefix(prefix)}
            for doc in index["docs"]
            if doc["location"].startswith(prefix)
        ]
        for doc in docs:
            doc["text"] = IN_PRE.sub("", doc["text"])
            if doc["location"].split("/")[0] in GENERATED:
                doc["boost"] = WRITTEN_BY_PROGRAMS
        for word, place in words.items():
            _found(docs, **place).setdefault("tags", []).append(word)
        settings = index["config"] | {"lang": sorted({"en", language})}
        own = site / language / "search" / "search_index.json"
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps({"config": settings, "docs": docs}, ensure_ascii=False), encoding="utf-8")


def _with_search(html: str, language: str, base: str) -> str:
    """With the language's index: Material looks for it in search/ under `base`, as for the pages that it names."""
    html = html.replace('role="dialog"', f'role="dialog" aria-label="{SEARCH[language]}"', 1)
    return re.sub(r'(?<="base": )"[^"]*"', json.dumps(base), html, count=1)


def _found(docs: list[dict], page: str, title: str = "") -> dict:
    """What the index has of a page, or of what stands there under this title; raises ConfigurationError for none."""
    for doc in docs:
        at, _, heading = doc["location"].partition("#")
        plain = re.sub(r"<.*?>|\u200b", "", unescape(doc["title"]))
        if at == f"{page}/" and (plain == title if title else not heading):
            return doc
    raise ConfigurationError(f"{SEARCH_WORDS}: there is no {title or 'page'} in {page}")


def description(html: str) -> str:
    """The first paragraph as plain text, for those who find the page by a search engine.

    Of a long one, the sentences that LONGEST characters hold, or the words of its first sentence.
    """
    paragraphs = (" ".join(unescape(re.sub("<.*?>", "", text)).split()) for text in PARAGRAPH.findall(html))
    text = next(filter(None, paragraphs), "").rstrip(":：")
    if len(text) <= LONGEST:
        return text
    if ends := [end.end() for end in SENTENCE_END.finditer(text[: LONGEST + 1])]:
        return text[: ends[-1]]
    return WHOLE_WORDS.match(text[:LONGEST])[0] + "…"


def _with_ids_of_the_english(html: str, page: Page, files: Files) -> str:
    """The Chinese page, whose headings have the ids of those at the same positions of the English page."""
    english = files.get_file_from_path(page.file.src_uri.replace("zh/", "en/", 1).replace("_cn", ""))
    headings = [*_headings(page.toc)]
    ids = {own.id: other.id for own, other in zip(headings, _headings(english.page.toc), strict=True)}
    for heading in headings:
        heading.id = ids[heading.id]
    return re.sub(r'(?<=<h\d id=")[^"]+|(?<=headerlink" href="#)[^"]+', lambda found: ids[found[0]], html)


def _headings(toc: Iterable[AnchorLink]) -> Iterator[AnchorLink]:
    """All of the page's, in order."""
    for heading in toc:
        yield heading
        yield from _headings(heading.children)


def _language(page: Page) -> str:
    return "zh" if page.url.startswith(("zh", "index_cn")) else "en"


def _origin(folder: Path) -> str:
    """Where the checkout comes from; "" if nobody knows."""
    command = ["git", "-C", str(folder), "config", "--get", "remote.origin.url"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def repository(origin: str) -> str:
    """A remote's address for a browser, without the user's name or password; "" for one that is no host's."""
    if at := re.fullmatch(r"[^@/]+@([\w.-]+):(.+)", origin):  # git@host:owner/name.git
        origin = f"ssh://{at[1]}/{at[2]}"
    parts = urlsplit(origin)
    if parts.scheme not in ("https", "http", "ssh"):
        return ""
    host = f"https://{parts.hostname}" if parts.scheme == "ssh" else f"{parts.scheme}://{parts.netloc.split('@')[-1]}"
    return host + parts.path.removesuffix(".git")


def _named(codes: str) -> str:
    """The codes with a title each: the framework, and the file if it is quoted from one."""

    def titled(code: re.Match) -> str:
        title = code["name"] or f"{FRAMEWORKS[code['package']]}: {code['package']}/{code['file']}"
        return code[0][code[0].index("```python") :].replace("```python", f'```python title="{title}"', 1)

    return re.sub(CODE, titled, codes, flags=re.DOTALL)


def _marked(pair: re.Match) -> str:
    """Two highlighted codes with their differing words marked; as they are where little is the same."""
    before, ref, between, port, after = pair.groups()
    parts = [WORDS.split(code) for code in (ref, port)]  # every second one is no word
    words = [[unescape(word) for word in of_one[::2]] for of_one in parts]
    places = [[i for i, word in enumerate(of_one) if word] for of_one in words]
    compared = ([FRAMEWORK.sub("framework", word) for word in of_one if word] for of_one in words)
    matcher = difflib.SequenceMatcher(None, *compared, autojunk=False)
    if matcher.ratio() < 0.5:
        return pair[0]
    for kind, *span in matcher.get_opcodes():
        for side in (0, 1):
            for place in places[side][slice(*span[2 * side : 2 * side + 2])] if kind != "equal" else ():
                if re.search(r"\w", words[side][place]):  # a bracket or a comma would be one more
                    parts[side][2 * place] = f"<mark>{parts[side][2 * place]}</mark>"
    return f"{before}{''.join(parts[0])}{between}{''.join(parts[1])}{after}"


def _labelled(table: str, kind: str) -> str:
    """The table, whose codes may break at dots and underscores, with the class `kind`, if it has one.

    The cells name their columns where there are more than two, or a `kind`.
    """
    table = re.sub("<code>.*?</code>", lambda code: re.sub("[._]", r"\g<0><wbr>", code[0]), table)
    heads = [re.sub("<.*?>", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table)]
    if len(heads) < 3 and not kind:
        return table
    labels = cycle(heads)
    table = re.sub("<td(?=[ >])", lambda _: f'<td data-label="{next(labels)}"', table)
    return table.replace("<table>", f'<table class="{kind}">' if kind else "<table data-cards>", 1)


def _folded(html: str, name: str) -> str:
    """The page with its sections folded, if `name` says so.

    The heading's id moves to what is folded: a browser opens it for a link that leads there. A heading to click on has
    no link of its own; the list of the page's contents has it.
    """
    for pages, is_open in ((FOLDED, ""), (FOLDED_ON_A_PHONE, " open")):
        for start, level in pages.items():
            if name.startswith(start):
                heading = rf'<h{level} id="(?P<id>[^"]+)"(?P<heading>.*?)<a [^>]*headerlink.*?</h{level}>'
                text = rf"(?P<text>.*?)(?={BEFORE_HEADING}<h[2-{level}]|\Z)"
                section = f"(?P<before>{BEFORE_HEADING}){heading}{text}"
                folded = rf'<details class="fold"{is_open}><summary><h{level}\g<heading></h{level}></summary>'
                folded += r'<div id="\g<id>">\g<before>\g<text></div></details>'
                return re.sub(section, folded, html, flags=re.DOTALL)
    return html


def _set(formula: re.Match) -> str:
    """The formula as MathML; several of one line, with \\qquad between them, come below one another on a phone."""
    if formula[1] == "span":
        return convert(unescape(formula[2]))
    parts = [convert(part.strip(), display="block") for part in unescape(formula[2]).split(r"\qquad")]
    return f'<div class="formula">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def _drawn(image: re.Match, page: Page, config: MkDocsConfig) -> str:
    """The picture itself, in the page's language."""

    def chinese(words: re.Match) -> str:
        return re.sub(SAID, lambda word: IN_CHINESE[word[0]], words[0])

    picture = (Path(config.docs_dir) / "images" / image["name"]).read_text(encoding="utf-8")
    picture = re.sub(r"<title>.*?</title>| aria-label=\"[^\"]*\"", "", picture)
    if page.url.startswith("zh"):
        picture = re.sub(r"(?<=>)[^<>]+(?=</text>)", chinese, picture)
    return picture.replace('role="img"', f'role="img" aria-label="{image["alt"]}"', 1)


def _ladder(page: Page, config: MkDocsConfig) -> str:
    """The picture, in which each rung's box and name are a link to the chapter in the page's language."""
    language = _language(page)
    picture = (Path(config.docs_dir) / "images" / "ladder.svg").read_text(encoding="utf-8")

    def link(rung: re.Match) -> str:
        chapter = "deploy" if rung[2] == "09_test_deploy" else rung[2].replace("_test_", "_")
        chapter = get_relative_url(f"{language}/{chapter}/", page.url)
        return f'<a href="{chapter}">{rung[0]}</a>'

    return re.sub(r"(<rect class=\"box\".*?>)<text.*?>(.*?)</text>", link, picture.replace(' role="img"', ""))
