"""The comparison: items, verdicts, the ruler, and where activations change their branch. Pure, NumPy only."""

from .comparison import compare
from .verdict import (
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

__all__ = [
    "DONE",
    "FAIL",
    "NOT_JUDGED",
    "PASS",
    "REFUSED",
    "Item",
    "Items",
    "Refused",
    "Row",
    "Verdict",
    "Worst",
    "compare",
    "exit_status",
    "joined",
    "placed",
    "tensor_item",
]
