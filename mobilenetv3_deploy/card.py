"""card.json, what an exported model's folder says of itself.

The folder holds model.onnx, weights.safetensors (the weights as trained, in the framework's own names) and, exported
from PaddlePaddle, inference.json and inference.pdiparams. Where the graph was quantized it holds model.onnx alone.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mobilenetv3_common.arguments import MODEL_NAMES
from mobilenetv3_deploy.preprocessing import Preprocessing
from sturdyio.cli import UserError, existing_dir
from sturdyio.files import atomic_path, read_file, refusing

FORMAT = 2
NAME = "card.json"
FRAMEWORKS = ("paddle", "torch")
OUTPUTS = ("logits", "probabilities")
AGAIN = "export the model again with tools/export_model.py"


@dataclass(frozen=True)
class Card:
    """Raises ValueError for values that no exported model has."""

    framework: str  # that it was exported from, see FRAMEWORKS
    model: str  # see MODEL_NAMES
    num_classes: int
    output: str  # what the engines give, see OUTPUTS
    preprocessing: Preprocessing
    class_names: list[str] | None
    weights_sha256: str  # of the file of weights that was exported
    files: Mapping[str, str] = field(default_factory=dict)  # {name: SHA-256}, all in the folder but the card
    made_with: Mapping[str, str] = field(default_factory=dict)  # {package: version}
    replaced: list[str] = field(default_factory=list)  # a line for each kind of layer: by what, how far it was proved
    layers: Mapping[str, str] = field(default_factory=dict)  # {weight tensor in model.onnx: the layer that has it}
    quantized: Mapping[str, Any] | None = None  # how many images it was calibrated on, drawn how, layers in float32

    def __post_init__(self) -> None:
        choices = ((self.framework, FRAMEWORKS), (self.model, MODEL_NAMES), (self.output, OUTPUTS))
        for value, known in choices:
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        if type(self.num_classes) is not int or self.num_classes < 1:
            raise ValueError(f"num_classes is {self.num_classes!r}")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(f"{len(self.class_names)} class_names for {self.num_classes} classes")
        for name in self.files:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no name of a file in the folder")


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal; raises UserError when it is missing, empty or cannot be read."""
    return hashlib.sha256(read_file(path, "file")).hexdigest()


def read_card(folder: str | Path) -> Card:
    """The card of an exported model, whose files are the ones that it names.

    Raises UserError for a folder or card that is missing or damaged, and a file that is missing or was changed.
    """
    folder = existing_dir(folder, "model folder")
    path = folder / NAME
    data = read_file(path, "card")
    with refusing(f"card {path}", "a model's card, as tools/export_model.py writes it", AGAIN):
        card = _parsed(json.loads(data))
    for name, sha256 in card.files.items():
        if sha256_of(folder / name) != sha256:
            raise UserError(f"file {folder / name} is not the one that {path} was written for: {AGAIN}")
    return card


def _parsed(content: Any) -> Card:
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, not {FORMAT}")
    given = content["preprocessing"]
    values = {one.name: given[one.name] for one in fields(Preprocessing)}
    values |= {name: tuple(map(float, values[name])) for name in ("mean", "std")}
    return Card(**{one.name: content[one.name] for one in fields(Card)} | {"preprocessing": Preprocessing(**values)})


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the end, and vanishes on any error."""
    if path.exists() or path.is_symlink():
        raise UserError(f"output {path} is already there: remove it, or choose another name")
    temporary = path.absolute().parent / f".{path.name}.tmp-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(path)
    except OSError as error:
        raise UserError(f"output {path} cannot be written ({error}): free space or choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_card(folder: str | Path, card: Card) -> Card:
    """Write `card` with the SHA-256 of every other file in `folder`, the whole file or none; returns that card."""
    folder = Path(folder)
    card = replace(card, files={path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.name != NAME})
    with atomic_path(folder / NAME) as temporary:
        text = json.dumps({"format": FORMAT} | asdict(card), indent=1, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    return card
