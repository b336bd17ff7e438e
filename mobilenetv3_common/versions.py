"""The versions of the frameworks that the two packages work with."""

import re
from types import ModuleType

from sturdyio.cli import UserError


def check_version(framework: ModuleType, lowest: str) -> None:
    """Raise UserError when the imported `framework` is older than `lowest`, such as "2.13".

    pyproject.toml's extras name the same. A PaddlePaddle built from sources without a version is 0.0.0, and passes.
    """
    found, wanted = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (framework.__version__, lowest))
    if (0, 0) < found < wanted:
        raise UserError(
            f"{framework.__name__} {framework.__version__} is older than {lowest}, the first that works here: "
            "install a newer one, or run sh shell/setup.sh"
        )
