"""Shoot the pictures of the report, docs/images/report*.png: step 01, run on ports with a fault, in both languages.

  python maintenance/pages/shoot_report.py            runs the step twice, and needs Chromium

A picture holds its words, as its "Description", and a test compares them with those of a new report.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from html import unescape
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from maintenance import DOCS
from maintenance.checks.gallery import FAULTS, copy_port, import_port, load_faults
from maintenance.pages.draw_network import outcome_of
from portproof.report.page import LANGUAGES, write_page
from portproof.report.summary import LadderResult, RungResult, environment
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, run

NAME = "shoot_report"
IMAGES = DOCS / "images"
STEP = "01_test_forward"
FAULT_OF = {  # a picture, without its language: the fault that the port has
    "report": "batch-norm epsilon left at its default",
    "report_momentum": "batch-norm momentum copied",
}
WIDTH = 1000  # pixels
SHOWN = re.compile(r'<h1>.*?</h1>|<section id="first".*?</section>', re.DOTALL)


def picture(name: str, language: str) -> Path:
    return IMAGES / (f"{name}.png" if language == "en" else f"{name}_{language}.png")


def words(page: str) -> str:
    """What the beginning of a report says, without its date."""
    return " ".join(unescape(re.sub("<.*?>", " ", " ".join(SHOWN.findall(page)))).split())


def reports(name: str) -> dict[str, str]:
    """{language: page} of a report of the step, made in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_reports, FAULT_OF[name]).result()


def _reports(fault_name: str) -> dict[str, str]:
    (fault,) = (fault for fault in load_faults(FAULTS) if fault.name == fault_name)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # from which the report names files
        port, path = Path("broken"), Path("report.html")
        copy_port(port, fault)
        import_port(port.absolute())
        step = outcome_of(STEP)
        about = environment(step.args, f"steps/{STEP}.py") | {"device": step.args.device}
        result = LadderResult([RungResult(STEP, step.args.model, 0.0, step)], about)
        pages = {}
        for language in LANGUAGES:
            write_page(result, path, language)
            pages[language] = path.read_text(encoding="utf-8")
        return pages


def shoot(page: str, path: Path) -> None:
    """Write what a browser shows of the page first, with its words."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise UserError("there is no chromium: on Debian or Ubuntu run 'apt install chromium'")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": WIDTH, "height": 1000})
        shown.set_content(page)
        first = shown.locator("#first").bounding_box()
        shown.screenshot(path=path, clip={"x": 0, "y": 0, "width": WIDTH, "height": first["y"] + first["height"] + 20})
        browser.close()
    info = PngInfo()
    info.add_itxt("Description", words(page))
    with Image.open(path) as image:
        image.convert("RGB").save(path, pnginfo=info, optimize=True)


def get_args_parser() -> argparse.ArgumentParser:
    return ArgumentParser(prog=NAME, description=__doc__, formatter_class=HelpFormatter)


def main(_: argparse.Namespace) -> int:
    for name in FAULT_OF:
        for language, page in reports(name).items():
            shoot(page, picture(name, language))
            print(f"wrote: docs/images/{picture(name, language).name}")
    return 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
