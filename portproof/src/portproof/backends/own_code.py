"""A module's own code, between the calls of its children: what it computes there, and in which lines.

Python's tracing shows each statement as it begins, and what the local names hold. A wrong value is traced back from
name to name, until all that a statement reads are values of the reference's. No operation of a framework has to be
known for that. Not followed: libraries, generators, code without a source file, what is kept in a module's attributes.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from portproof.arrays import same_bits
from portproof.backends.lent import owned_tensors
from portproof.backends.trace import tensors_in
from sturdyio.cli import one_line

if TYPE_CHECKING:
    from portproof.backends.base import Backend

Tensors = tuple[Any, ...]
IsKnown = Callable[[np.ndarray], bool]  # whether it is a value of the reference's
INSTALLED = ("site-packages", "dist-packages")  # in the paths of libraries, whatever environment they are in
NOT_FOLLOWED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # functions up to Python 3.11; part of their statement
LONGEST = 100  # characters of a statement in a report


@contextmanager
def between_children(
    backend: Backend, module: Any, switch: Callable[[bool], Any], called: Callable[[str, Any], Any]
) -> Iterator[None]:
    """Call `switch(True)` where the module's own code begins, `switch(False)` where it calls a child, and so on.

    `called(label, arguments)` is told of each child's call. A child in a container that only calls it counts as called
    by the module.
    """
    runs = backend.runs
    counts: Counter[str] = Counter()
    running: list[str] = []

    def before(name: str) -> Callable:
        def hook(_: Any, args: tuple, kwargs: dict) -> None:
            if not running:
                counts.clear()
            counts[name] += 1
            running.append(name)
            if len(running) == 2:
                switch(False)
                called(name if counts[name] == 1 else f"{name}#{counts[name]}", (args, kwargs))
            elif len(running) == 1:
                switch(True)

        return hook

    def after(*_: Any) -> None:
        running.pop()
        if len(running) < 2:
            switch(bool(running))

    with ExitStack() as hooks:
        for name, part in backend.layers.named_modules(module):
            if not name or not backend.layers.is_container(part):
                for handle in (runs.hook_before(part, before(name)), runs.hook_after(part, after)):
                    hooks.callback(handle.remove)
        yield


def place_of(file: str, line: int) -> str:
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line}"


def place_of_class(kind: type, library: str) -> str:
    """Where a class begins; "" for one of the `library`, and for one without a source file."""
    source = None if kind.__module__.startswith(library) else _source_of_class(kind)
    return place_of(*source) if source else ""


@lru_cache(maxsize=1024)
def _source_of_class(kind: type) -> tuple[str, int] | None:
    try:
        return inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        return None


@dataclass(frozen=True)
class Statement:
    """A simple statement, or the head of a compound one."""

    file: str
    line: int
    last: int
    reads: frozenset[str] = frozenset()  # names
    columns: tuple[int, int | None] = (0, None)  # in bytes: where it begins in its line, and ends in the last

    @property
    def place(self) -> str:
        return place_of(self.file, self.line)

    @property
    def text(self) -> str:
        lines = [line.encode() for line in linecache.getlines(self.file)[self.line - 1 : self.last]]
        lines[-1] = lines[-1][: self.columns[1]]
        lines[0] = lines[0][self.columns[0] :]
        text = " ".join(b" ".join(lines).decode().split())
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def _heads(node: ast.AST) -> list[ast.expr | ast.stmt]:
    """What of a statement runs at its own place: all of it, unless it holds others."""
    if isinstance(node, ast.Lambda):
        return [node.body]
    if not isinstance(node, ast.stmt) or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return []
    if not hasattr(node, "body"):
        return [node]
    heads = [getattr(node, name, None) for name in ("test", "target", "iter", "subject")]
    heads += [item.context_expr for item in getattr(node, "items", ())]
    return [head for head in heads if head is not None]


@lru_cache(maxsize=64)
def _statements(file: str) -> list[Statement]:
    """Shortest first; none if there is no source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        heads = _heads(node)
        if heads:
            assert isinstance(node, (ast.stmt, ast.Lambda))
            names = [name for head in heads for name in ast.walk(head) if isinstance(name, ast.Name)]
            reads = {name.id for name in names if isinstance(name.ctx, ast.Load)}
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                reads.add(node.target.id)
            first, last = heads[0] if isinstance(node, ast.Lambda) else node, heads[-1]
            assert last.end_lineno is not None
            columns = first.col_offset, last.end_col_offset
            found.append(Statement(file, first.lineno, last.end_lineno, frozenset(reads), columns))
    return sorted(found, key=lambda each: each.last - each.line)


@lru_cache(maxsize=4096)
def _statement(file: str, line: int) -> Statement:
    holding = (each for each in _statements(file) if each.line <= line <= each.last)
    return next(holding, Statement(file, line, line))


@dataclass(eq=False)
class Step:
    """A statement as it ran once."""

    statement: Statement
    unknown: dict[str, _Held]  # names that it reads, with values that are not the reference's
    began: int  # as all steps begin and end
    ended: int = 0
    changed: set[str] = field(default_factory=set)  # names
    functions: list[_Function] = field(default_factory=list)  # that it called


@dataclass(eq=False)
class _Function:
    """A function's run."""

    caller: Step | None
    held: dict[str, _Held] = field(default_factory=dict)  # by local name
    step: Step | None = None  # the latest
    wrong: Tensors = ()  # what of its result is no value of the reference's


@dataclass(frozen=True, eq=False)
class _Held:
    """The tensors in a local name, from the statement that put them there or that called `given_to` with them."""

    tensors: Tensors
    arrays: list[np.ndarray]
    wrong: Tensors
    maker: Step | None
    given_to: _Function | None = None

    def is_still(self, tensors: Tensors, arrays: Sequence[np.ndarray]) -> bool:
        same = len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors))
        return same and all(map(same_bits, arrays, self.arrays))


NOTHING = _Held((), [], (), None)
Wrong = tuple[Step, Tensors]  # where something was used, and what of it is no value of the reference's
Waiting = tuple[Step, Tensors, Optional[_Function]]  # the same, and the function whose argument it is
Passed = tuple[Optional[Step], Tensors, Optional[_Function]]  # the same, without a step where that was not followed


class Followed:
    """What the module's own code did in a run."""

    def __init__(self, backend: Backend, module: Any, is_known: IsKnown) -> None:
        self.backend, self.is_known = backend, is_known
        self.parameters = {id(tensor) for _, tensor in owned_tensors(backend, module)}
        python_module = type(module).__module__
        self.is_library = python_module.startswith(backend.layers.library)
        self.own_file = getattr(sys.modules.get(python_module), "__file__", None)
        modules = backend.framework, sys.modules["portproof"]
        framework, kit = (Path(inspect.getfile(module)).parent for module in modules)
        self.libraries = tuple(f"{path}{os.sep}" for path in (sysconfig.get_path("stdlib"), framework, kit))
        self.running: list[_Function] = []
        self.outermost: _Function | None = None  # the module's forward
        self.clock = count(1)
        self.calls: dict[str, Wrong] = {}  # what children received, by label
        self.raised: tuple[str, Statement] | None = None  # the latest exception, and where

    @contextmanager
    def following(self, module: Any) -> Iterator[None]:
        """Follow what `module` runs in this context, unless it is a layer of the library."""
        before = sys.gettrace()

        def switch(is_own: bool) -> None:
            sys.settrace(self.trace if is_own and not self.is_library else before)

        try:
            with between_children(self.backend, module, switch, self.note_call):
                yield
        finally:
            sys.settrace(before)

    def note_call(self, label: str, arguments: Any) -> None:
        if self.running and self.running[-1].step is not None:
            self.calls[label] = self.running[-1].step, self._wrong(*self._read(arguments))

    def trace(self, frame: FrameType, _event: str, _: Any) -> Callable | None:
        """For sys.settrace: called where a function begins."""
        if not self._is_followed(frame.f_code):
            return None
        caller = self.running[-1].step if self.running else None
        function = _Function(caller)
        if caller is None:
            self.outermost = function
        else:
            caller.functions.append(function)
        self.running.append(function)
        self._update(function, frame)
        return self._trace_lines

    def _trace_lines(self, frame: FrameType, event: str, value: Any) -> Callable:
        function = self.running[-1]
        if event == "line":
            statement = _statement(frame.f_code.co_filename, frame.f_lineno)
            if function.step is None or statement != function.step.statement:
                self._update(function, frame)
                read = {name: function.held[name] for name in statement.reads & function.held.keys()}
                unknown = {name: held for name, held in read.items() if held.wrong}
                function.step = Step(statement, unknown, next(self.clock))
        elif event == "exception" and function.step is not None:
            error = one_line(value[1])
            if self.raised is None or error != self.raised[0]:  # else a function that called this one passes it on
                self.raised = error, function.step.statement
        elif event == "return":
            self._update(function, frame)
            function.wrong = self._wrong(*self._read(value))
            self.running.pop()
        return self._trace_lines

    def _is_followed(self, code: CodeType) -> bool:
        file = code.co_filename
        is_own = file == self.own_file or not (file.startswith(self.libraries) or any(map(file.count, INSTALLED)))
        is_function = not code.co_flags & NOT_FOLLOWED and code.co_name not in COMPREHENSIONS
        return is_own and is_function and bool(linecache.getlines(file))

    def _read(self, value: Any) -> tuple[Tensors, list[np.ndarray]]:
        try:
            tensors = tuple(tensors_in(value, self.backend.framework.is_tensor))
            return tensors, [self.backend.to_array(tensor, copy=False) for tensor in tensors]
        except Exception:  # of a tensor without values, or a user's object
            return (), []

    def _wrong(self, tensors: Tensors, arrays: Sequence[np.ndarray]) -> Tensors:
        """Those that hold no value of the reference's."""
        unsure = ((tensor, array) for tensor, array in zip(tensors, arrays) if id(tensor) not in self.parameters)
        return tuple(tensor for tensor, array in unsure if not self.is_known(array))

    def _update(self, function: _Function, frame: FrameType) -> None:
        """Note which names the function's latest statement changed, which has ended; before the first, all."""
        if function.step is not None:
            function.step.ended = next(self.clock)
        for name, value in frame.f_locals.items():
            tensors, arrays = self._read(value)
            if function.held.get(name, NOTHING).is_still(tensors, arrays):
                continue
            maker = (function.caller, function) if function.step is None else (function.step,)
            copies, wrong = [array.copy() for array in arrays], self._wrong(tensors, arrays)
            function.held[name] = _Held(tensors, copies, wrong, *maker)
            if function.step is not None:
                function.step.changed.add(name)

    @property
    def result(self) -> Wrong | None:
        """What is wrong of what the module returned; None if that was not followed."""
        last = self.outermost
        return None if last is None or last.step is None else (last.step, last.wrong)

    def blamed(self, step: Step, wrong: Tensors) -> list[Statement]:
        """Where the `wrong` tensors at this step left the reference's values: all statements between, in order."""
        found: dict[Step, int] = {}  # with the time when it computed that
        seen = set()
        waiting: list[Waiting] = [(step, wrong, None)]
        while waiting:
            step, wrong, given_to = waiting.pop()
            place = step, frozenset(map(id, wrong)), given_to
            if place in seen:
                continue
            seen.add(place)
            ended = step.functions[: step.functions.index(given_to)] if given_to else step.functions
            passed_on = _passed_on(step, wrong, ended)
            if not passed_on:
                time = step.began if given_to else step.ended
                found[step] = min(time, found.get(step, time))
                passed_on = [(held.maker, held.wrong, held.given_to) for held in step.unknown.values()]
                passed_on += [(each.step, each.wrong, None) for each in ended if each.wrong]
            waiting += [(maker, part, given_to) for maker, part, given_to in passed_on if maker is not None]
        return list(dict.fromkeys(step.statement for step in sorted(found, key=lambda each: found[each])))


def _passed_on(step: Step, wrong: Tensors, ended: Sequence[_Function]) -> list[Passed]:
    """Where the wrong tensors were made, if the statement only passes them on."""
    wanted = set(map(id, wrong))
    for each in ended:
        if wanted <= set(map(id, each.wrong)):
            return [(each.step, wrong, None)]
    held = [each for name, each in step.unknown.items() if name not in step.changed]
    parts = [(each, tuple(t for t in each.wrong if id(t) in wanted)) for each in held]
    if not wanted <= {id(t) for _, part in parts for t in part}:
        return []
    return [(each.maker, part, each.given_to) for each, part in parts if part]
