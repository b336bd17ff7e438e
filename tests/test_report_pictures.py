"""The pictures of the report in README and on the front page show what a report says now."""

import re

import pytest
from PIL import Image

from maintenance.pages.shoot_report import FAULT_OF, IMAGES, picture, reports, words
from portproof.report.page import LANGUAGES

# What differs from one machine to the next: sizes, and the place in an item.
MEASURED = re.compile(r"(?<![\w.=])-?\d+\.\d+(?:e[+-]\d+)?|\(\d+,[\d, ]*\)")


@pytest.mark.thorough("the one that README shows", but="momentum")
@pytest.mark.parametrize("name", FAULT_OF)
def test_a_picture_has_the_words_of_a_new_report(name):
    pages = reports(name)
    for language, page in pages.items():
        with Image.open(picture(name, language)) as image:
            shown = image.text["Description"]
        assert MEASURED.sub("#", shown) == MEASURED.sub("#", words(page))
    assert "portproof" in pages["en"] and "步骤" in words(pages["zh"])


def test_each_picture_of_the_report_is_made_by_the_program():
    assert {*IMAGES.glob("report*.png")} == {picture(name, language) for name in FAULT_OF for language in LANGUAGES}
