"""What a model says of an image, as a record, and the formats in which records are printed."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from sturdyio.cli import printable


@dataclass(frozen=True)
class ClassScore:
    """One class and its probability; `name` is "" where the classes have no names."""

    class_id: int
    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, the best first."""

    path: str
    top: list[ClassScore]


def top_classes(probabilities: np.ndarray, k: int, names: Sequence[str] | None) -> list[ClassScore]:
    """The `k` most probable of `probabilities` (num_classes,); of equal ones the lower id comes first."""
    best = np.argsort(-probabilities, kind="stable")[:k]
    return [ClassScore(int(i), names[i] if names else "", float(probabilities[i])) for i in best]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (N, num_classes) of `logits` of that shape, in their dtype."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def table_line(prediction: Prediction) -> str:
    """PATH: 281 tabby 0.9091, 282 tiger cat 0.0312"""
    classes = (" ".join(filter(None, (str(c.class_id), c.name, f"{c.probability:.4f}"))) for c in prediction.top)
    return f"{printable(prediction.path)}: {', '.join(classes)}"


def json_line(prediction: Prediction) -> str:
    """{"path": PATH, "top": [{"class_id": 281, "name": "tabby", "probability": 0.9091}, ...]}"""
    return json.dumps(asdict(prediction))


CSV_HEADER = "path,rank,class_id,name,probability"


def csv_lines(prediction: Prediction) -> str:
    """A line a class, the best of rank 1, with the columns of CSV_HEADER."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, score in enumerate(prediction.top, 1):
        writer.writerow((prediction.path, rank, score.class_id, score.name, score.probability))
    return text.getvalue().rstrip("\n")


FORMATS: dict[str, Callable[[Prediction], str]] = {"table": table_line, "jsonl": json_line, "csv": csv_lines}
