"""The comparison: items, verdicts, tolerances, and where activations change their branch. Pure, NumPy only."""

from .comparison import compare
from .verdict import FAIL, PASS, REFUSED, Item, Items, Row, Verdict, Worst, joined, placed, tensor_item

__all__ = [
    "FAIL",
    "PASS",
    "REFUSED",
    "Item",
    "Items",
    "Row",
    "Verdict",
    "Worst",
    "compare",
    "joined",
    "placed",
    "tensor_item",
]
