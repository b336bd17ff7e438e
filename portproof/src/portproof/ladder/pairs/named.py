"""Models, functions and inputs that are named by text, on a command line or in a script."""

import ast
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from portproof.io.cli import UserError, one_line, resolve


def model_factory(text: str, what: str = "model") -> Callable[[], Any]:
    """What makes the model "PKG.MOD:NAME" or "PKG.MOD:NAME(KEYWORD=LITERAL, ...)", anew at each call.

    Raises UserError, which calls it `what`, if it is not there; so does the factory where making the model raises, as
    for keywords that it does not take.
    """
    module_name, _, call = text.partition(":")
    try:
        node = ast.parse(call, mode="eval").body
        kwargs = {}
        if isinstance(node, ast.Call) and not node.args:
            kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            node = node.func
        if not isinstance(node, ast.Name) or None in kwargs or not module_name:
            raise ValueError("it is none")
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{what} {text!r} is no PKG.MOD:FACTORY nor PKG.MOD:FACTORY(KEYWORD=VALUE, ...)") from error
    named = resolve(f"{module_name}:{node.id}", what)

    def factory() -> Any:
        try:
            return named(**kwargs)
        except Exception as error:  # whatever a factory of the user's may raise
            raise UserError(f"{what} {text!r}: making it raised {one_line(error)}") from error

    return factory


def draw_inputs(texts: Sequence[str], seed: int, what: str = "input") -> list[np.ndarray]:
    """An array for each of `texts`, "SHAPE[:DTYPE[:HIGH]]" such as "2,3,224,224" or "2,16:int64:30522".

    Probe images where the shape is that of images, whole numbers below HIGH, else normal numbers, float32. Raises
    UserError, which calls it `what`, for text that is none.
    """
    from portproof.backends.probe import probe_images

    rng, drawn = np.random.default_rng([seed, 9]), []
    for text in texts:
        shape_text, _, rest = text.partition(":")
        dtype, _, high = rest.partition(":")
        try:
            shape = tuple(int(n) for n in shape_text.split(","))
            if min(shape) < 1 or dtype not in ("", "float32", "int64", "int32") or (high and int(high) < 1):
                raise ValueError
        except ValueError as error:
            raise UserError(f"{what} {text!r} is no shape such as 2,3,224,224 or 2,16:int64:30522") from error
        if dtype.startswith("int"):
            drawn.append(rng.integers(0, int(high or 2), shape).astype(dtype))
        elif len(shape) == 4 and shape[1] == 3 and shape[2] % 16 == shape[3] % 16 == 0:
            drawn.append(probe_images(rng, shape[0], *shape[2:]))
        else:
            drawn.append(rng.normal(size=shape).astype(np.float32))
    return drawn
