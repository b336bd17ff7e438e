"""Every operation with a constant is exact in float64 where it is replaced, or the table says how far it is off.

The table has a row for each version that was measured; `write_float64_constants.py` writes those that are installed.
"""

import numpy as np
import pytest
from float64_operations import LIMIT, MISSING, OPERATIONS, Framework, distance, expected, load, of, rounded, row

TABLE = load()
BEYOND_CONSTANTS = {"torch": {"batch_norm"}, "paddle": set()}  # replaced for its sums: see test_fp64_torch.py


@pytest.fixture(scope="module", params=["torch", "paddle"])
def framework(request) -> Framework:
    return Framework(request.param)


@pytest.fixture(scope="module")
def measured(framework) -> dict:
    return row(framework)


def rows(framework: Framework) -> list[dict]:
    return [row for version, row in TABLE.items() if version.split()[0] == framework.name]


def split(said: str) -> tuple[float, str]:
    off, _, why = said.partition(" ")
    return (0.0, off) if off == MISSING else (float(off), why)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_constant_would_show_if_it_were_float32(name):
    operation = OPERATIONS[name]
    exact = expected(operation, operation.constants)
    for said, constants in rounded(operation.constants):
        got = expected(operation, constants)
        assert max(distance(got[way], exact[way]) for way in exact) > 100 * LIMIT, said


def test_what_is_measured_is_what_the_table_says(framework, measured):
    """Of a version without a row: nothing is left that is not left in another."""
    left = measured["with replacements"]
    if framework.version not in TABLE:
        known = {what for each in rows(framework) for what in each["with replacements"]}
        assert {what for what, said in left.items() if said != MISSING} <= known
        return
    expected_row = TABLE[framework.version]
    assert measured["needed"] == expected_row["needed"]
    for part in ("as it is", "with replacements"):
        assert measured[part].keys() == expected_row[part].keys()
        for what, said in measured[part].items():
            (off, why), (expected_off, expected_why) = split(said), split(expected_row[part][what])
            assert why == expected_why and off == pytest.approx(expected_off, rel=0.5), what  # it has one digit


def test_a_replacement_takes_all_that_the_operation_takes(measured):
    missing = [
        {what for what, said in measured[part].items() if said == MISSING} for part in ("as it is", "with replacements")
    ]
    assert missing[0] == missing[1]


BENDS = {
    "elu": 0,
    "celu": 0,
    "selu": 0,
    "leaky_relu": 0,
    "hardtanh": 1,
    "hardsigmoid": 3,
    "hardswish": 3,
    "softshrink": 0.5,
}


@pytest.mark.parametrize("name", BENDS)
def test_a_replacement_has_the_native_gradient_where_its_formula_bends(framework, name):
    """There two formulas of one function may differ by more than rounding."""
    x, call = np.array([-BENDS[name], BENDS[name]], float), of(name)
    native = framework.run(call, x, ())
    with framework.exact():
        exact = framework.run(call, x, ())
    for way, values in native.items():
        np.testing.assert_allclose(exact[way], values, rtol=1e-6, atol=1e-6)


def test_each_replacement_is_needed_in_some_version(framework):
    needed = {name for each in rows(framework) for name in each["needed"]}
    assert needed | BEYOND_CONSTANTS[framework.name] == set(map(framework.title, framework.replaced))
