"""Items, limits, verdicts and activation branches. Pure functions, NumPy only."""

from .comparison import compare  # noqa: F401 - for other packages
from .verdict import (  # noqa: F401
    DONE,
    FAIL,
    NOT_JUDGED,
    PASS,
    REFUSED,
    Item,
    Items,
    Refused,
    Row,
    Verdict,
    Worst,
    exit_status,
    joined,
    placed,
    tensor_item,
)
