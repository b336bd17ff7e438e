"""What a user's model holds, whatever its class forbids: it is read, copied, lent and restored, and left as it was."""

import threading
from collections import OrderedDict, defaultdict
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import torch
from toy_pairs import Port, Ref, assert_aligned, normal

from portproof.backends import backend
from portproof.backends.containers import contents, put, refill, shallow_copy
from portproof.backends.trace import map_tensors

T, P = torch.nn, paddle.nn


def refuse(*_args, **_keywords):
    raise RuntimeError("its class forbids it")


COPIES = ("copy", "__copy__", "__deepcopy__", "__reduce_ex__")
READS = ("__iter__", "__getitem__", "items", "keys")
CHANGES = ("__setitem__", "__setattr__", "clear", "update", "extend", "append")
FORBIDDEN = dict.fromkeys((*COPIES, *READS, *CHANGES), refuse)
FrozenDict = type("FrozenDict", (dict,), FORBIDDEN)
FrozenOrdered = type("FrozenOrdered", (OrderedDict,), FORBIDDEN)
FrozenDefault = type("FrozenDefault", (defaultdict,), {**FORBIDDEN, "__setattr__": object.__setattr__})
FrozenList = type("FrozenList", (list,), FORBIDDEN)
Frozen = type("Frozen", (), {**FORBIDDEN, "__slots__": ("slot", "__dict__")})


def frozen_dict(kind, **items):
    made = kind.__new__(kind)
    for key, item in items.items():
        put(made, key, item)
    return made


def frozen_list(*items):
    made = list.__new__(FrozenList)
    refill(made, list(items))
    return made


def frozen_object(**attributes):
    made = object.__new__(Frozen)
    vars(made).update(attributes)
    Frozen.slot.__set__(made, "kept")
    return made


def held(tensor):
    """Objects that forbid, each with a tensor, and objects that nothing can copy."""
    return {
        "config": frozen_dict(FrozenDict, b=tensor, a=1),
        "ordered": frozen_dict(FrozenOrdered, b=tensor, a=2),
        "default": frozen_dict(FrozenDefault, b=tensor),
        "items": frozen_list(tensor, 3),
        "thing": frozen_object(value=tensor),
        "lock": threading.Lock(),
        "numbers": (i for i in range(3)),
    }


def test_copies_are_of_the_same_class_and_hold_the_same():
    of_list, of_dict = frozen_list(1, 2), frozen_dict(FrozenOrdered, b=1, a=2)
    default = shallow_copy(defaultdict(list, a=[1]))
    assert type(shallow_copy(of_list)) is FrozenList and contents(shallow_copy(of_list)) == [1, 2]
    assert contents(shallow_copy(of_dict)) == [("b", 1), ("a", 2)]
    assert default["a"] == [1] and default["b"] == []
    thing = shallow_copy(frozen_object(value=3))
    assert (type(thing), thing.value, thing.slot) == (Frozen, 3, "kept")


def test_tensors_are_changed_in_a_copy_alone():
    one = np.ones(2)
    changed = map_tensors(held(one), lambda value: isinstance(value, np.ndarray), lambda array: array + 1)
    for kind, given in held(one).items():
        if kind not in ("lock", "numbers"):
            assert type(changed[kind]) is type(given)
    assert contents(changed["ordered"])[1] == ("a", 2) and dict.__getitem__(changed["config"], "b")[0] == 2
    assert list.__getitem__(changed["items"], 0)[0] == changed["thing"].value[0] == 2 and one[0] == 1


def factor(m):
    return dict.__getitem__(m.config, "b") + list.__getitem__(m.items, 0) + m.thing.value


def test_a_model_of_such_objects_is_judged_and_left_as_it_was():
    ref = Ref(lambda m, x: torch.relu(m.a(x)) * factor(m), a=T.Linear(4, 3))
    port = Port(lambda m, x: P.functional.relu(m.a(x)) * factor(m), a=P.Linear(4, 3))
    given = held(torch.tensor(1.5)), held(paddle.to_tensor(1.5))
    for model, objects in zip((ref, port), given):
        for name, value in objects.items():
            object.__setattr__(model, name, value)
    assert_aligned(ref, port, normal(2, 4))
    for model, objects in zip((ref, port), given):
        assert all(vars(model)[name] is value for name, value in objects.items())
        assert contents(model.ordered) == [("b", contents(model.ordered)[0][1]), ("a", 2)]
        assert str(contents(model.items)[0].dtype).endswith("float32")
    copied = backend("torch").wrap(ref, "reference").copied("", "float64", train=True)
    assert copied.a is not ref.a and copied.a.weight.dtype == torch.float64
    assert copied.lock is ref.lock and copied.thing.value.dtype == torch.float64


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers(layout, persistent):
    graph = np.diag([1.7, 0.3, 2.1]).astype(np.float32)
    ref = Ref(lambda m, x: m.a(torch.sparse.mm(m.graph, x)), a=T.Linear(4, 2))
    ref.register_buffer("graph", torch.from_numpy(graph).to_sparse(layout=layout), persistent=persistent)
    port = Port(lambda m, x: m.a(m.graph.to_dense() @ x), a=P.Linear(4, 2))
    port.register_buffer("graph", paddle.to_tensor(graph).to_sparse_coo(2), persistable=persistent)
    assert_aligned(ref, port, normal(3, 4))
    assert ref.graph.layout is layout and port.graph.is_sparse()
    assert ref.graph.dtype == torch.float32


def test_a_mapping_that_is_no_dict_is_copied_by_its_own_methods():
    from collections import UserDict

    given = UserDict(a=np.ones(2))
    changed = map_tensors(given, lambda value: isinstance(value, np.ndarray), lambda array: array + 1)
    assert changed["a"][0] == 2 and given["a"][0] == 1
    assert vars(shallow_copy(SimpleNamespace(a=1))) == {"a": 1}
