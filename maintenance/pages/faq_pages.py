"""The pages that are generated: the FAQ by topic, what it covers, the catalogue of differences, the guide's map."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maintenance.pages.faq_catalogue import Row
from maintenance.pages.faq_sources import TOPICS, Entry, Source

OTHER = {"en": "zh", "zh": "en"}
# The order of the catalogue: a port begins with the layers, and a topic with what most models use. A row that has none
# of these names follows, by its own.
CATALOGUE_TOPICS = ("layers", "losses", "optimizers", "gradients", "weights", "data", "tensors")
CATALOGUE_TOPICS += tuple(topic for topic in TOPICS if topic not in CATALOGUE_TOPICS)
COMMON = (
    *("conv2d", "linear", "batchnorm2d", "avgpool", "avg_pool", "dropout", "relu"),
    *("crossentropyloss", "cross_entropy"),
    *(".sgd", ".adam", "rmsprop", "zero_grad", "clip_grad", "steplr", "cosineannealinglr(optimizer, 500"),
    *("no_grad", "load_state_dict", "torch.load", "kaiming", "normal_", "constant_"),
    *(".dataloader", "totensor", "normalize", ".resize", "crop", "imagefolder"),
    *("torch.tensor.view", "flatten", "multiply", "gather", "sum", "one_hot"),
    *("manual_seed", ".eval", "autocast"),
)
FRAMEWORK_NAMES = {"torch": "PyTorch", "paddle": "PaddlePaddle", "mindspore": "MindSpore"}
WORDS = {
    "en": {
        "switch": "中文",
        "faq": "The FAQ that runs",
        "faq_text": (
            "Every question of the documents that people read when they port a model, with the answer as it holds on "
            "the versions that this project pins, and code that proves it. The tests run all of it: "
            "`pytest tests/test_faq.py -k NAME` runs the code of one answer.\n\n"
            "**holds**: the document's own answer is true today. **changed**: it is not, or no longer all; the note "
            "says what is. **elsewhere**: it takes what is not at hand here, such as a card; the code shows as much as "
            "a CPU can."
        ),
        "coverage": "What it covers",
        "status": {"holds": "holds", "changed": "changed", "elsewhere": "elsewhere"},
        "originals": ("Original: ", "; "),
        "coverage_head": "| question | answer | status | tested by |",
        "catalogue": "API differences",
        "catalogue_text": (
            "Calls that stand for each other in PyTorch and PaddlePaddle. Both were given the same input and run: the "
            "size is what was measured, the largest difference of any element, between the calls as they are. With the "
            "arguments named they agree within 1e-12 (float64) or 1e-6 (float32) of the largest value, and exactly "
            "where nothing is rounded.\n\nThe column `paddle.compat` says whether PyTorch's own code, run on Paddle "
            "after `paddle.enable_compat()`, gives PyTorch's result: yes, no, or the call does not exist. "
            "The FAQ says [when to use it](faq/porting.md#compat), and [when not](faq/porting.md#compat-limits)."
        ),
        "catalogue_head": (
            "| PyTorch | PaddlePaddle | same by default? | what makes it the same | `paddle.compat` | "
            "error if unchanged | proof |"
        ),
        "yes": "yes",
        "no": "**no**",
        "nothing": "nothing does",
        "compat": {"": "", "yes": "yes", "no": "no", "no name": "no such call"},
        "sizes": {},
        "guide": "The guide, section by section",
        "guide_text": "Where this tutorial covers each section, and answers each question, of",
        "guide_head": "| section of the guide | here |",
        "question_head": "| question of the guide | answer |",
    },
    "zh": {
        "switch": "English",
        "faq": "能运行的 FAQ",
        "faq_text": (
            "移植模型时大家常读的几份文档里的每一个问题，都有一份在本项目所固定的版本上成立的答案，以及证明它的代码。"
            "测试会运行全部代码：`pytest tests/test_faq.py -k NAME` 只运行一个答案的代码。\n\n"
            "**成立**：原文档的答案今天仍然正确。**原回答已过时**：不再正确或不再完整，备注说明现在的情况。"
            "**本机无法验证**：需要这里没有的东西（例如显卡），代码只演示 CPU 能演示的部分。"
        ),
        "coverage": "覆盖情况",
        "status": {"holds": "成立", "changed": "原回答已过时", "elsewhere": "本机无法验证"},
        "originals": ("原文：", "；"),
        "coverage_head": "| 问题 | 答案 | 状态 | 测试 |",
        "catalogue": "API 差异表",
        "catalogue_text": (
            "PyTorch 与 PaddlePaddle 中互相对应的调用。给两边相同的输入并运行：差异大小是实测值，"
            "即不加任何处理时各元素差的最大值。加上表中的参数后，"
            "两边在最大值的 1e-12（float64）或 1e-6（float32）以内一致，不涉及舍入时完全相同。"
            "\n\n`paddle.compat` 一列说明：调用 `paddle.enable_compat()` 之后，PyTorch 的代码原样在 Paddle 上运行，"
            "是否得到 PyTorch 的结果：是、否，或者代码调用的 API 不存在。"
            "FAQ 说明了[何时使用](faq/porting.md#compat)以及[何时不用](faq/porting.md#compat-limits)。"
        ),
        "catalogue_head": (
            "| PyTorch | PaddlePaddle | 默认相同？ | 怎样使其相同 | `paddle.compat` | 不修改时的误差 | 证明 |"
        ),
        "yes": "是",
        "no": "**否**",
        "nothing": "没有办法",
        "compat": {"": "", "yes": "是", "no": "否", "no name": "无此调用"},
        "sizes": {
            ", largest value ": "，最大值 ",
            "values of shape ": "形状为 ",
            "shape ": "形状 ",
            "not a number": "非数",
            "raises ": "抛出 ",
            " against ": " 对 ",
        },
        "guide": "与指南逐节对照",
        "guide_text": "下列指南的每一节在本教程的何处，每一个问题在何处回答：",
        "guide_head": "| 指南的章节 | 本教程 |",
        "question_head": "| 指南的问题 | 答案 |",
    },
}


def topic_pages(entries: Sequence[Entry], sources: Iterable[Source]) -> dict[str, str]:
    """The FAQ, a page for each topic and language, by its path in docs/."""
    pages, by_name = {}, {source.name: source for source in sources}
    for language in WORDS:
        for topic, words in TOPICS.items():
            of_topic = [entry for entry in entries if entry.topic == topic]
            switch = _switch(language, f"faq/{topic}.md", 2)
            text = [f"# {words['title'][language]}", switch, words["about"][language]]
            pages[f"{language}/faq/{topic}.md"] = _page(
                [*text, *(_answer(entry, by_name, language) for entry in of_topic)]
            )
    return pages


def _answer(entry: Entry, sources: Mapping[str, Source], language: str) -> str:
    status = WORDS[language]["status"][entry.status]
    parts = [f'<a id="{entry.slug}"></a>', f"## {entry.question[language]}", entry.answer[language]]
    if entry.note:
        parts.append(f"**{status}** {entry.note[language]}")
    if entry.questions:
        names = dict.fromkeys(name.partition("/")[0] for name in entry.questions)
        head, between = WORDS[language]["originals"]
        parts.append(head + between.join(_linked(sources[name], language) for name in names))
    for framework, code in entry.snippets.items():
        parts += [f"**{FRAMEWORK_NAMES[framework]}**", f"```python\n{code.strip()}\n```"]
    return "\n\n".join(parts)


def _linked(source: Source, language: str) -> str:
    """The title, which is a link where the document's address is known."""
    title = source.title[language]
    return f"[{title}]({source.url})" if source.url else title


def coverage_pages(entries: Sequence[Entry], sources: Iterable[Source]) -> dict[str, str]:
    """What the FAQ covers: every question of every document, with its answer, status and tests."""
    by_question = {name: entry for entry in entries for name in entry.questions}
    pages = {}
    for language, words in WORDS.items():
        topics = [f"- [{of['title'][language]}]({topic}.md)" for topic, of in TOPICS.items()]
        parts = [f"# {words['faq']}", _switch(language, "faq/index.md", 2), words["faq_text"], "\n".join(topics)]
        parts.append(f"## {words['coverage']}")
        for source in sources:
            title = source.title[language]
            rows = [words["coverage_head"], "| --- " * 4 + "|"]
            for question in source.questions:
                entry = by_question[question.id]
                status = " ".join(filter(None, (f"**{words['status'][entry.status]}**", entry.note.get(language))))
                tests = " ".join(f"`test_snippet_holds[{framework}-{entry.slug}]`" for framework in entry.snippets)
                cells = (question.text[language], f"[{entry.slug}]({entry.topic}.md#{entry.slug})", status, tests)
                rows.append(_row(cells))
            parts += [f"### {title}", f"<{source.url}>" if source.url else "", "\n".join(rows)]
        pages[f"{language}/faq/index.md"] = _page(parts)
    return pages


def catalogue_pages(rows: Sequence[Row]) -> dict[str, str]:
    """The differences between the calls that were compared: a table for each topic, what most models use first."""
    pages = {}
    for language, words in WORDS.items():
        name = "api_differences.md"
        parts = [f"# {words['catalogue']}", _switch(language, name, 1), words["catalogue_text"]]
        for topic in CATALOGUE_TOPICS:
            of_topic = sorted((row for row in rows if row.entry.topic == topic), key=_rarity)
            if of_topic:
                table = [words["catalogue_head"], "| --- " * 7 + "|", *(_pair(row, words) for row in of_topic)]
                parts += [f"## {TOPICS[topic]['title'][language]}", "\n".join(table)]
        pages[f"{language}/{name}"] = _page(parts)
    return pages


def _rarity(row: Row) -> tuple[int, str]:
    """The place of a row among those of its topic."""
    call = row.entry.pair.torch.lower()
    return next((place for place, name in enumerate(COMMON) if name in call), len(COMMON)), call


def _pair(row: Row, words: Mapping[str, Any]) -> str:
    """A line of the catalogue."""
    entry, pair = row.entry, row.entry.pair
    arguments = f"`{pair.arguments}`" if pair.arguments else ("" if row.same else words["nothing"])
    proof = f"[{entry.slug}](faq/{entry.topic}.md#{entry.slug})"
    same = words["yes"] if row.same else words["no"]
    size = row.size
    for english, own in words["sizes"].items():
        size = size.replace(english, own)
    compat = words["compat"][row.compat]
    return _row((f"`{pair.torch}`", f"`{pair.paddle}`", same, arguments, compat, size, proof))


def guide_pages(entries: Sequence[Entry], source: Source) -> dict[str, str]:
    """Where the tutorial covers each section, and answers each question, of the document in `source`."""
    by_question = {name: entry for entry in entries for name in entry.questions}
    pages = {}
    for language, words in WORDS.items():
        sections = [words["guide_head"], "| --- " * 2 + "|"]
        for number, title, chapter in source.sections:
            sections.append(_row((f"{number} {title[language]}", f"[{chapter.removesuffix('.md')}]({chapter})")))
        answers = [words["question_head"], "| --- " * 2 + "|"]
        for question in source.questions:
            entry = by_question[question.id]
            link = f"[{entry.slug}](faq/{entry.topic}.md#{entry.slug})"
            answers.append(_row((question.text[language], link)))
        name = "guide_map.md"
        text = f"{words['guide_text']} [{source.title[language]}]({source.url})"
        parts = [f"# {words['guide']}", _switch(language, name, 1), text, "\n".join(sections), "\n".join(answers)]
        pages[f"{language}/{name}"] = _page(parts)
    return pages


def _switch(language: str, page: str, depth: int) -> str:
    """The link to the same page in the other language."""
    return f"[{WORDS[language]['switch']}]({'../' * depth}{OTHER[language]}/{page})"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"
