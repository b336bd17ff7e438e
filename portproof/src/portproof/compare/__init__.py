"""The comparison: items, verdicts, the ruler, and where activations change their branch. Pure, NumPy only."""

from .comparison import compare  # noqa: F401 - these are what other packages import
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
