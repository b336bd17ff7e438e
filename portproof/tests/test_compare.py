"""The comparison never passes what it should not: properties of `compare` on arrays that hypothesis makes up.

And what is printed about a failure, the weights' conversion, the activations, and the arithmetic of the ruler.
"""

import gc
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from portproof.arrays import same_bits
from portproof.backends.trace import output_item
from portproof.compare import (
    FAIL,
    NOT_JUDGED,
    PASS,
    REFUSED,
    Item,
    Row,
    Verdict,
    compare,
    joined,
    placed,
    tensor_item,
)
from portproof.compare.activations import MARGIN, branch_flips, off_kinks
from portproof.compare.ruler import (
    MOST_HIDDEN,
    OVERFLOWS,
    RUNS,
    U64,
    K,
    Ruler,
    S,
    U,
    distances,
    exact_atol,
    kernel_atol,
    moved_by_rounding,
    noise_floor,
)
from portproof.convert.rules import RULES, paddle_to_torch, torch_to_paddle
from portproof.ladder.pairs.pair import MODES
from portproof.ladder.rung import Rung
from portproof.localize.locate import Location
from portproof.report.text import block_of, last_line, render, row_line, section_of, table, usual_causes
from sturdyio.cli import UserError
from sturdyio.files import load_npy

FLOATS = [np.dtype(name) for name in ("float16", "float32", "float64")]
INTS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
TEXTS = [np.dtype("bool"), np.dtype("U1"), np.dtype("U5")]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)


def elements(dtype: np.dtype) -> st.SearchStrategy:
    """Finite values of a dtype: all of them, and few, so that two arrays often agree somewhere."""
    if dtype.kind == "f":
        return st.sampled_from([-1.0, 0.0, -0.0, 1.0, 1.5]) | hnp.from_dtype(
            dtype, allow_nan=False, allow_infinity=False
        )
    if dtype.kind in "iu":
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        return st.sampled_from([0, 1, low, low + 1, high - 1, high]) | st.integers(low, high)
    return hnp.from_dtype(dtype)


def arrays(dtypes: list[np.dtype], shapes: st.SearchStrategy = SHAPES) -> st.SearchStrategy:
    """Arrays of finite values."""
    return st.sampled_from(dtypes).flatmap(lambda dtype: hnp.arrays(dtype, shapes, elements=elements(dtype)))


@st.composite
def pairs(draw, dtypes: list[np.dtype]) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of one shape and dtype: the second the first with some elements changed, or another."""
    ref = draw(arrays(dtypes))
    other = draw(hnp.arrays(ref.dtype, ref.shape, elements=elements(ref.dtype)))
    changed = draw(hnp.arrays(bool, ref.shape, elements=st.booleans()))
    return ref, np.where(changed, other, ref).astype(ref.dtype)


LIMITS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 1e-3, 2.0**53, 1e300]) | st.floats(0, 1e308)


def judge(ref, port, limit=0.0, **kwargs) -> Row:
    """The one row of a comparison of one item."""
    verdict = compare({"x": ref}, {"x": port}, {} if limit is None else {"x": limit}, **kwargs)
    assert verdict.status == verdict.rows[0].status
    return verdict.rows[0]


def differences(ref: np.ndarray, port: np.ndarray) -> dict[tuple[int, ...], float]:
    """The oracle: element by element, in Python's numbers, of which whole ones are exact."""
    both = {index: (ref[index].item(), port[index].item()) for index in np.ndindex(ref.shape)}
    if ref.dtype.kind in "bU":
        return {index: float(a != b) for index, (a, b) in both.items()}
    return {index: float(abs(a - b)) for index, (a, b) in both.items()}


@settings(max_examples=1000)
@given(pairs(FLOATS + INTS + TEXTS), LIMITS)
def test_verdict_is_that_of_the_oracle(pair, limit):
    """So a pass means max|d| <= limit, element by element; and the worst place is the worst."""
    ref, port = pair
    row, errors = judge(ref, port, limit), differences(ref, port)
    allowed = 0.0 if ref.dtype.kind in "bU" else limit
    outside = {index: error for index, error in errors.items() if not error <= allowed}
    if outside:
        assert row.status == FAIL
        assert (row.worst.outside, row.worst.size) == (len(outside), ref.size)
        assert errors[row.worst.index] == max(errors.values()) == row.difference
        assert (row.worst.ref, row.worst.port) == (ref[row.worst.index].item(), port[row.worst.index].item())
        assert row.reason == ""
    else:
        assert row.worst is None
        vacuous = allowed > 0 and allowed >= max(abs(float(value)) for value in ref.flat)
        assert row.status == (REFUSED if vacuous else PASS)
        assert row.difference == max(errors.values())
    assert (row.name, row.shape) == ("x", ref.shape)


@given(pairs(FLOATS + INTS + TEXTS), LIMITS)
def test_inputs_are_left_alone(pair, limit):
    for array in pair:
        array.setflags(write=False)
    before = [array.tobytes() for array in pair]
    judge(*pair, limit)
    assert [array.tobytes() for array in pair] == before


@given(pairs(FLOATS), st.data(), LIMITS | st.none() | st.just(float("nan")))
def test_what_is_not_finite_fails(pair, data, limit):
    """On either side or on both, at one place or at another, NaN or infinity, whatever the limit."""
    sides = [array.copy() for array in pair]
    bad = data.draw(st.sampled_from([(0,), (1,), (0, 1)]))
    for side in bad:
        index = data.draw(st.sampled_from(list(np.ndindex(sides[side].shape))))
        sides[side][index] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    row = judge(*sides, limit)
    assert row.status == FAIL
    assert row.reason == f"not finite: reference {int(0 in bad)}, port {int(1 in bad)} of {sides[0].size}"


@given(arrays(FLOATS + INTS + TEXTS), st.sampled_from(FLOATS + INTS + TEXTS), LIMITS)
def test_another_dtype_fails(ref, dtype, limit):
    assume(ref.dtype != dtype and not ref.dtype.kind == dtype.kind == "U")
    row = judge(ref, np.zeros(ref.shape, dtype), limit)
    assert (row.status, row.reason) == (FAIL, f"dtype: reference {ref.dtype}, port {dtype}")


@given(hnp.mutually_broadcastable_shapes(num_shapes=2, min_dims=0, max_dims=3, min_side=0, max_side=3), LIMITS)
def test_another_shape_fails_even_if_it_broadcasts(shapes, limit):
    one, other = shapes.input_shapes
    assume(one != other)
    row = judge(np.ones(one, np.float32), np.ones(other, np.float32), limit)
    assert (row.status, row.reason) == (FAIL, f"shape: reference {one}, port {other}")


@given(hnp.arrays(np.float32, st.tuples(st.integers(2, 4), st.integers(2, 4)), elements=elements(np.dtype("float32"))))
def test_a_transposed_array_fails(ref):
    assume(ref.shape[0] != ref.shape[1] or (ref != ref.T).any())
    assert judge(ref, ref.T).status == FAIL
    assert judge(ref, np.asfortranarray(ref)).status == PASS  # the same array, otherwise laid out


@given(arrays(FLOATS + INTS + TEXTS, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=2)), LIMITS)
def test_an_empty_array_is_refused(ref, limit):
    empty = ref[:0]
    row = judge(empty, empty.copy(), limit)
    assert (row.status, row.reason) == (REFUSED, "it is empty")


@given(pairs(FLOATS + INTS + TEXTS), st.sampled_from([None, float("nan"), float("inf"), -1.0, -float("inf"), -1e-300]))
def test_an_unusable_limit_never_passes(pair, limit):
    row = judge(*pair, limit)
    assert row.status == REFUSED
    assert row.reason == ("no limit is given for it" if limit is None else f"its limit is {limit}")


NAMED = st.dictionaries(st.sampled_from("abcdef"), arrays(FLOATS, st.just((2,))))


@given(NAMED, NAMED, st.permutations("abcdef"))
def test_keys(ref, port, order):
    """Rows in the reference's order, then the port's own; the port's order changes nothing but theirs."""
    verdict = compare(ref, port, dict.fromkeys("abcdef", 0.0))
    extra = [name for name in port if name not in ref]
    assert [row.name for row in verdict.rows] == [*ref, *extra]
    reasons = {row.name: row.reason for row in verdict.rows}
    for name in reasons:
        if name not in port:
            assert reasons[name] == "the port does not have it"
        elif name not in ref:
            assert reasons[name] == "the reference does not have it"
    statuses = {row.name: row.status for row in verdict.rows}
    if ref.keys() != port.keys():
        assert verdict.status == FAIL
    elif not ref:
        assert (verdict.status, verdict.rows) == (REFUSED, [])
        assert verdict.refusal == "there is nothing to compare: both sides are empty"
    else:
        alike = {name: judge(ref[name], port[name]).status for name in ref}
        assert (statuses, verdict.status) == (alike, max(alike.values()))
    shuffled = compare(ref, {name: port[name] for name in order if name in port}, dict.fromkeys("abcdef", 0.0))
    assert shuffled.status == verdict.status
    assert shuffled.rows[: len(ref)] == verdict.rows[: len(ref)]


@given(arrays(FLOATS), st.floats(1, 1e3))
def test_a_limit_under_which_zeros_would_pass_is_refused(ref, factor):
    limit = factor * float(np.abs(ref.astype(np.float64)).max())
    assume(0 < limit < 1e300)
    row = judge(ref, ref.copy(), limit)
    assert row.status == REFUSED
    assert "zeros would pass" in row.reason
    assert judge(ref, ref.copy(), limit, expected_zero={"x"}).status == PASS
    assert judge(ref, ref.copy(), limit, expected_zero={"y"}).status == REFUSED
    assert judge(ref, (ref + np.array(3 * limit)).astype("float64"), limit, expected_zero={"x"}).status == FAIL


@pytest.mark.parametrize(
    "ref, port, limit, status, difference",
    [
        (2**53, 2**53 + 1, 0.0, FAIL, 1.0),  # float64 holds only one of the two
        (2**53, 2**53 + 1, 0.5, FAIL, 1.0),
        (2**63 - 1, 2**63 - 301, 100.0, FAIL, 300.0),
        (2**63 - 1, 2**63 - 301, 300.0, PASS, 300.0),
        (-(2**63), -(2**63), 1.0, PASS, 0.0),  # whose absolute value int64 does not hold
        (-(2**63), 2**63 - 1, 1.0, FAIL, 2.0**64),
        (-(2**63), 2**63 - 1, 0.0, FAIL, 2.0**64),
    ],
)
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_whole_numbers_are_subtracted_exactly(ref, port, limit, status, difference, shape):
    row = judge(np.full(shape, ref, np.int64), np.full(shape, port, np.int64), limit)
    assert (row.status, row.difference) == (status, difference)


def test_float16_is_subtracted_in_float64():
    row = judge(np.array([65504], np.float16), np.array([-65504], np.float16), 1.0)
    assert (row.status, row.difference) == (FAIL, 131008.0)


def test_strings_of_other_lengths_are_compared():
    assert judge(np.array(["a", "bc"]), np.array(["a", "bc"], "U9")).status == PASS
    row = judge(np.array(["a", "bc"]), np.array(["a", "bcd"]), 1.0)
    assert (row.status, row.worst.index, row.worst.ref, row.worst.port) == (FAIL, (1,), "bc", "bcd")


@pytest.mark.parametrize("array", [np.array([None]), np.array([b"a"]), np.array(["2026"], "M8[Y]")])
def test_other_kinds_of_arrays_fail(array):
    row = judge(array, array.copy(), 1.0)
    assert (row.status, row.reason) == (FAIL, f"dtype {array.dtype} cannot be compared")


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_are_compared_by_the_modulus_of_the_difference(dtype):
    ref = np.array([3 + 4j, 1j], dtype)
    row = judge(ref, ref + np.array([0.3 + 0.4j, 0], dtype), 0.6)
    assert row.status == PASS and row.difference == pytest.approx(0.5) and row.scale == pytest.approx(5)
    row = judge(ref, ref + np.array([0, 0.3 + 0.4j], dtype), 0.4)
    assert (row.status, row.worst.index, row.worst.outside, row.worst.ref) == (FAIL, (1,), 1, 1j)
    assert judge(ref, ref.conj(), 1.0).status == FAIL
    assert judge(ref, np.array([3 + 4j, complex(0, np.nan)], dtype), 1.0).reason.startswith("not finite")
    assert judge(ref, ref.real, 1.0).reason.startswith("dtype")
    assert judge(ref, ref, 5.5).status == REFUSED


def test_complex_numbers_have_limits_as_real_ones_have():
    fp64_ref = {"a": np.array([3 + 4j, 0])}
    fp32_ref = {"a": np.array([3 + 4j, 1e-6j])}
    assert kernel_atol(fp64_ref, fp32_ref)["a"] == pytest.approx(5 * 1e-6 + 16 * 2.0**-24 * 5)
    least = judged_by(Ruler({OUT: fp64_ref["a"]}), off_by(1e-12, fp64_ref["a"]))
    assert (least.status, least.atol) == (PASS, pytest.approx(5e-12))


def test_a_failure_outranks_a_refusal():
    one = np.ones(3)
    items = {"refused": one, "passed": one, "failed": one}
    verdict = compare(items, {**items, "failed": 2 * one}, {"passed": 0.0, "failed": 0.0})
    assert (verdict.status, verdict.first_failure.name) == (FAIL, "failed")
    verdict = compare(items, items, {"passed": 0.0, "failed": 0.0})
    assert (verdict.status, verdict.first_failure.name) == (REFUSED, "refused")
    verdict = compare(items, items, dict.fromkeys(items, 0.0))
    assert (verdict.status, verdict.first_failure) == (PASS, None)


def test_joined():
    good = compare({"a": np.ones(2)}, {"a": np.ones(2)}, {"a": 0.0})
    bad = compare({"b": np.ones(2)}, {"b": np.zeros(2)}, {"b": 0.0})
    nothing = compare({}, {}, {})
    assert joined("t", [good, good]).status == PASS
    assert (joined("t", [good, bad]).status, joined("t", [good, bad]).first_failure.name) == (FAIL, "b")
    assert joined("t", [good, nothing]).status == REFUSED
    assert joined("t", [bad, nothing]).status == FAIL
    assert joined("t", []).status == joined("t", [nothing]).status == joined("t", [Verdict("")]).status == REFUSED
    assert joined("t", [good]).title == "t"


TYPES = {"features.0.0": "Conv2d", "features.0.1": "BatchNorm2d", "classifier.0": "Linear"}


def output(label: str) -> Item:
    return output_item(label, "logits")


def good_verdict() -> Verdict:
    items = {output("features.0.0"): np.ones((2, 3)), output("logits"): np.full(5, 2.0)}
    return compare(items, items, dict.fromkeys(items, 1e-6), title="eval mode, float32")


def bad_verdict() -> Verdict:
    """The second of three items is off at one place, the third everywhere."""
    arrays = {"features.0.0": np.ones((2, 3)), "features.0.1": np.full((2, 3), 4.0), "logits": np.ones(5)}
    ref = {output(name): array for name, array in arrays.items()}
    port = {item: array.copy() for item, array in ref.items()}
    port[output("features.0.1")][1, 2] = 4.5
    port[output("logits")] += 3
    return compare(ref, port, dict.fromkeys(ref, 1e-6), title="eval mode, float64")


def test_report_of_a_failure():
    """It names the first failing item, its index and both values, and what agreed before it."""
    assert render(bad_verdict(), block_of, TYPES).splitlines() == [
        "eval mode, float64",
        "  FAIL    features.0  1 of 2 items     max|d| 5.0e-01  limit 1.0e-06  outside 1/6 (16.7%)  at features.0.1",
        "  FAIL    logits      5                max|d| 3.0e+00  limit 1.0e-06  outside 5/5 (100.0%)",
        "first difference: features.0.1 (BatchNorm2d): max|d| 5.0e-01  limit 1.0e-06  outside 1/6 (16.7%)",
        "  worst at (1, 2): reference 4.0, port 4.5, 1.2e-01 of the largest value",
        "  all items before it agree (1): look at features.0.1 itself",
        f"  usual causes: {usual_causes(output('features.0.1'), TYPES, {})}",
    ]


def test_report_of_a_pass():
    assert render(good_verdict(), block_of, TYPES).splitlines() == [
        "eval mode, float32",
        "  ok      features.0  2x3              max|d| 0.0e+00  limit 1.0e-06",
        "  ok      logits      5                max|d| 0.0e+00  limit 1.0e-06",
    ]


def test_what_agrees_is_folded_by_section():
    """Consecutive groups that pass are one line, of one section; what fails or stands alone keeps its own."""

    def row(section: str, kind: str, difference: float) -> Row:
        status = PASS if difference <= 1 else FAIL
        return Row(Item(f"{kind} of it", kind, section=section), status, (1,), difference, 1.0)

    layers = "float32, isolated layers"
    rows = [row("float64", "output", 0.1), row("float64", "gradient", 0.7), row("float64", "buffer", 2.0)]
    rows += [row("float32", "output", 0.2), row(f"{layers}/a", "output", 0.3), row(f"{layers}/b", "output", 0.4)]
    lines = [line.split(" max|d| ") for line in table(rows, section_of, fold=True)]
    starts = [" ".join(start.split()) for start, _ in lines]
    assert starts == [
        "ok float64 2 items",
        "FAIL float64/buffer 1",
        "ok float32/output 1",
        f"ok {layers} 2 items",
    ]
    assert lines[0][1].split() == ["7.0e-01", "limit", "1.0e+00", "at", "float64/gradient/gradient", "of", "it"]
    assert len(table(rows, section_of)) == len(rows)
    plain = [Row(Item(name), PASS, (1,), 0.0, 1.0) for name in "abc"]
    (line,) = table(plain, str, fold=True)
    assert line.split()[:6] == ["ok", "a", "to", "c", "3", "items"]


def test_report_of_a_refusal():
    lines = render(compare({"a": np.ones(2)}, {"a": np.ones(2)}, {"a": 5.0}), str, {}).splitlines()
    assert lines[-1] == "first refusal: a: limit 5.0e+00 is not below its largest value 1.0e+00: zeros would pass"
    assert render(compare({}, {}, {}), str, {}).splitlines()[-1].startswith("  REFUSED there is nothing to compare")


def test_a_group_is_shown_by_its_worst_item():
    """A failure by structure before one by value, that before a refusal, that before a pass."""
    rows = [
        Row(Item("passed"), PASS, (1,), 0.9, 1.0),
        Row(Item("refused"), REFUSED, (1,), reason="no limit is given for it"),
        Row(Item("off"), FAIL, (1,), 5.0, 1.0),
        Row(Item("far off"), FAIL, (1,), 8e-3, 1e-3),
        Row(Item("lost"), FAIL, (1,), reason="the port does not have it"),
    ]
    for count, shown in enumerate(("0.9", "no limit", "5.0e+00", "8.0e-03", "does not have it"), 1):
        (line,) = table(rows[:count], lambda item: "group")
        assert shown in line.replace("9.0e-01", "0.9")
    assert line.split()[:6] == ["FAIL", "group", "4", "of", "5", "items"]
    assert len(table([*rows, *rows], str)) == 10  # runs of one label, in order, never merged


def test_a_log_line_is_one_item():
    first, second, third = (row_line(row) for row in bad_verdict().rows)
    assert first == "  ok      features.0.0  2x3  max|d| 0.0e+00  limit 1.0e-06"
    assert second.startswith("  FAIL    features.0.1  2x3  max|d| 5.0e-01")
    assert row_line(Row(Item("x"), FAIL, (), reason="why")) == "  FAIL    x  scalar  why"


def test_the_last_line_names_place_and_cause():
    also = [Location(name, "BatchNorm2d", "forward", diagnosis=["epsilon is 1, not 2"]) for name in ("b", "c")]
    also += [Location("d", "ReLU", "forward")]
    verdict = replace(bad_verdict(), location=replace(also[0], name="a", also=also))
    kinds = "a (BatchNorm2d) and 2 more of that kind: forward: epsilon is 1, not 2; 1 more at fault by itself"
    assert last_line("x", verdict) == f"FAIL x: {kinds}; 2 of 3 items outside their limits"
    every = joined("x", [good_verdict(), verdict])
    assert last_line("x", every) == f"FAIL x: {kinds}; 2 of 5 items outside their limits"
    one = replace(verdict, location=also[2], caveats=["the map is by name"])
    assert last_line("x", one) == "FAIL x: d (ReLU): forward; 2 of 3 items outside their limits; the map is by name"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (["encoder.0.weight"], ""),
        (["encoder.0.weight", "encoder.0.bias"], "; there 2 of 5 parameters differ, all in encoder.0"),
        (["encoder.0.bias", "encoder.10.norm.weight"], "; there 2 of 5 parameters differ, all in encoder"),
        (["encoder.0.weight", "encoder_2.weight"], "; there 2 of 5 parameters differ"),
        (["encoder.0.weight", "scale"], "; there 2 of 5 parameters differ"),
        (["scale"], ""),
    ],
)
def test_the_last_line_says_how_many_parameters_differ_and_where(bad, said):
    """Of the run of the first that does, in however many comparisons."""
    names = ("encoder.0.weight", "encoder.0.bias", "encoder.10.norm.weight", "encoder_2.weight", "scale")
    ref, port = ({tensor_item(name, "parameter"): np.ones(2) for name in names} for _ in range(2))
    port |= {tensor_item(name, "parameter"): np.zeros(2) for name in bad}
    other = placed(ref, iteration=1), placed(dict.fromkeys(ref, np.zeros(2)), iteration=1)
    verdicts = [compare(*sides, exact_atol(sides[0])) for sides in ((ref, ref), (ref, port), other)]
    line = last_line("x", replace(joined("x", verdicts), caveats=["by name"]))
    first = next(name for name in names if name in bad)
    assert line == f"FAIL x: {5 + len(bad)} of 15 items outside their limits, first parameter/{first}{said}; by name"


@pytest.fixture
def rung() -> Rung:
    """A rung before its first check."""
    rung = Rung("00_fake")
    rung.types = TYPES
    return rung


REFUSED_VERDICT = compare({}, {}, {}, title="nothing")


@pytest.mark.parametrize(
    "verdicts, status, line",
    [
        ([good_verdict()], 0, "PASS 00_fake: all 2 items within their limits"),
        (
            [good_verdict(), bad_verdict()],
            1,
            "FAIL 00_fake: 2 of 5 items outside their limits, first features.0.1",
        ),
        (
            [REFUSED_VERDICT, bad_verdict(), good_verdict()],
            1,
            "FAIL 00_fake: 2 of 5 items outside their limits, first features.0.1",
        ),
        ([good_verdict(), REFUSED_VERDICT], 2, "REFUSED 00_fake: there is nothing to compare: both sides are empty"),
        ([], 2, "REFUSED 00_fake: there is nothing to compare"),
    ],
    ids=["pass", "fail", "fail-and-refused", "refused", "nothing"],
)
def test_a_rung_ends_in_its_verdict(rung, tmp_path, capsys, verdicts, status, line):
    """On the terminal, in the log, as exit status; and the files hold what was compared."""
    for verdict in verdicts:
        assert rung.check(verdict) == (verdict.status == PASS)
    arrays = {"logits": np.ones((2, 3), np.float32)}
    rung.keep(arrays, {"logits": 2 * arrays["logits"]})
    rung.write(tmp_path, "fake")
    assert rung.status == status
    assert capsys.readouterr().out.splitlines()[-1] == line
    log = (tmp_path / "log" / "fake_diff.log").read_text(encoding="utf-8")
    assert line in log.splitlines()
    for row in (row for verdict in verdicts for row in verdict.rows):
        assert row_line(row) in log.splitlines()
    for side, value in (("ref", 1), ("paddle", 2)):
        (saved,) = load_npy(tmp_path / f"fake_{side}.npy").values()
        np.testing.assert_array_equal(saved, np.full((2, 3), value, np.float32), strict=True)


@pytest.mark.parametrize("lost", [1e-13, 1e7, 0.0, float("nan"), float("inf")])
def test_a_rung_refuses_a_lost_signal(rung, capsys, lost):
    alive = {"a": np.ones(2), "labels": np.zeros(2, int)}
    rung.check_signal(alive)
    assert rung.verdicts == []
    rung.check(good_verdict())
    rung.check_signal({**alive, "b": np.array([lost]), "c": np.array([lost])})
    assert rung.status == REFUSED
    assert capsys.readouterr().out.count("the signal is lost at b") == 1


WEIGHT = "features.0.0.weight"


@pytest.mark.parametrize(
    ("item", "name", "group"),
    [
        (tensor_item("features.0.1.running_mean", "buffer"), "features.0.1.running_mean", "running statistics"),
        (output("features.3.block.0.1"), "features.3.block.0.1", "features.3"),
        (output("logits"), "logits", "logits"),
        (tensor_item(WEIGHT, "gradient", iteration=3), f"iteration 3/gradient/{WEIGHT}", "iteration 3/gradient"),
        (tensor_item(WEIGHT, "parameter", section="sgd"), f"sgd/parameter/{WEIGHT}", "sgd/parameter"),
        (tensor_item("a.running_var", "buffer", iteration=3), "iteration 3/a.running_var", "iteration 3"),
        (Item("loss", "loss", iteration=0, section="run"), "run/iteration 0/loss", "run/iteration 0"),
        (Item("lr, cosine", "lr"), "lr, cosine", "lr, cosine"),
    ],
)
def test_items_are_named_and_grouped_by_their_fields(item, name, group):
    assert (str(item), block_of(item)) == (name, group)


def test_a_tensors_module_and_leaf_are_known():
    item = tensor_item("features.0.1.running_mean", "buffer")
    assert (item.module, item.leaf) == ("features.0.1", "running_mean")
    assert tensor_item("gain", "parameter").leaf == "gain"


def test_items_that_differ_in_any_fact_are_different_items():
    """The same tensor's gradient and value, of two modes, are four items."""
    items = {tensor_item(WEIGHT, kind, mode=mode): np.ones(1) for kind in ("gradient", "parameter") for mode in MODES}
    assert len(items) == 4
    verdict = compare(items, dict(list(items.items())[:3]), dict.fromkeys(items, 0.0))
    assert [row.status for row in verdict.rows] == [PASS, PASS, PASS, FAIL]
    assert (verdict.rows[3].item.kind, verdict.rows[3].item.mode) == ("parameter", "train")


def test_causes_are_known_for_every_kind_of_item():
    types = {"features.0.1": "BatchNorm2d", "features.1": "Hardsigmoid", "features.2": "Conv2dNormActivation"}
    assert usual_causes(Item("?"), {}, {}) == ""
    assert [name for name in types if not usual_causes(output(name), types, {})] == []
    for item, word in [
        (tensor_item("features.0.1.running_mean", "buffer"), "OLD value"),
        (tensor_item("features.0.1.running_var", "buffer", iteration=3), "unbiased"),
        (Item("lr", "lr", iteration=3), "schedule"),
        (Item("a.JPEG label", "label"), "labels off by one"),
        (tensor_item(WEIGHT, "structure"), "layer missing"),
        (tensor_item(WEIGHT, "gradient"), "backward"),
        (output("logits"), "classifier"),
    ]:
        assert word in usual_causes(item, types, {})


def test_a_check_may_have_hints_of_its_own():
    item = tensor_item(WEIGHT, "gradient")
    verdict = compare({item: np.ones(2)}, {item: np.zeros(2)}, {item: 0.0}, hints={"gradient": "averaged twice"})
    assert render(verdict, str, {}).splitlines()[-1] == "  usual causes: averaged twice"
    assert joined("t", [verdict]).hints == {"gradient": "averaged twice"}


@given(
    st.sampled_from([(kind, leaf) for kind, leaves in RULES.items() for leaf in leaves]),
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2)),
)
def test_conversion_keeps_bits_and_transposes_only_linear_weights(rule, array):
    kind, leaf = rule
    ((name, there),) = torch_to_paddle({f"m.{leaf}": array}, {"m": kind}).items()
    is_linear = rule == ("Linear", "weight")
    assert there.tobytes() == (array.T if is_linear else array).tobytes()
    weight = "scale" if kind.startswith("InstanceNorm") else "_weight" if kind == "PReLU" else "weight"
    renamed = {"running_mean": "_mean", "running_var": "_variance", "weight": weight}
    assert name == f"m.{renamed.get(leaf, leaf)}"
    ((back_name, back),) = paddle_to_torch({name: there}, {"m": kind}).items()
    assert (back_name, back.shape, back.tobytes()) == (f"m.{leaf}", array.shape, array.tobytes())


@pytest.mark.parametrize("convert", [torch_to_paddle, paddle_to_torch])
@pytest.mark.parametrize(
    "key, types, said",
    [
        ("a.weight", {"a": "RMSNorm"}, r"a\.weight \(RMSNorm\)"),
        ("b.weight", {"a": "Linear"}, r"b\.weight \(no layer of this model\)"),
        ("a.running_mean", {"a": "Linear"}, r"a\.running_mean \(Linear\)"),
        ("weight", {"": "TinyNet"}, r"weight \(TinyNet\)"),
    ],
)
def test_what_no_rule_covers_is_refused(convert, key, types, said):
    with pytest.raises(UserError, match=f"no rule converts {said}: "):
        convert({key: np.zeros(2)}, types)


def test_branch_flips():
    types = {"r": "ReLU", "h": "Hardswish"}
    one = {"r": np.array([-1.0, 1e-9, 5.9]), "h": np.array([-3.1, -2.9, 3.1, 0])}
    same = {"r": np.array([-9.0, 1, 6.1]), "h": np.array([-9.0, 2.9, 9, 1])}  # past 6 ReLU has no kink
    assert branch_flips(one, same, types) == {}
    other = {"r": np.array([1.0, -1e-9, 5.9]), "h": np.array([-3.1, -3.1, -3.1, 0])}
    assert branch_flips(one, other, types) == {"r": 2, "h": 3}  # 3.1 -> -3.1 crosses both kinks


def test_inputs_at_a_kink_are_moved_off_it():
    """Also 2.9999998, to which a kernel adds 3 and gets 6; what is further away stays, and 0, which nothing rounds."""
    below, above = np.nextafter(np.float32(3), np.float32([0, 9]))
    x = np.float32([below, 3, above, -3, 2.99, 0, 1e-9])
    moved, margin = off_kinks(x, "Hardswish"), 3 * MARGIN
    assert moved.dtype == x.dtype
    np.testing.assert_allclose(moved[:4], [3 - margin, 3 + margin, 3 + margin, -3 + margin], rtol=0, atol=2.4e-7)
    assert not (np.float32(3) + moved[:1] >= 6).any() and (moved[4:] == x[4:]).all()
    for kind in ("ReLU", "Conv2d"):
        assert off_kinks(x, kind).tobytes() == x.tobytes()


def judged_by(ruler: Ruler, port: dict[Item, np.ndarray]) -> Row:
    """The row of the only item."""
    (row,) = ruler.compare(port).rows
    return row


OUT = Item("out", "output")
REF = {OUT: np.array([-4.0, 1.0])}


def off_by(difference: float, ref: np.ndarray = REF[OUT]) -> dict[Item, np.ndarray]:
    return {OUT: ref + np.array([0.0, difference])}


def test_limits_widen_in_one_order_and_what_a_step_needs_is_asked_for_then():
    """float64: the least limit, the float32 run, perturbed runs, rounded coefficients, float32 data."""
    asked = []

    def errors() -> dict[Item, float]:
        asked.append("float32")
        return {OUT: 2.0**-9}

    def perturbed(i: int) -> dict[Item, float]:
        asked.append(f"perturbed {i}")
        return {OUT: 1e-10 * i}

    def rounded() -> list[dict[Item, float]]:
        asked.append("rounded")
        return [{OUT: 1e-9}, {OUT: 2e-9}]

    ruler = partial(Ruler, REF, "float64", errors, perturbed, rounded, has_float32_data=True)
    limits = {
        "": 4e-12,
        "float32": 8 * 2.0**-29 * 2.0**-9,
        "perturbed": 8 * 5e-10,
        "rounded": 8 * 5e-10 + 3e-9,
        "float32 data": 5 * 2.0**-9,
    }
    every = ["float32", *(f"perturbed {i}" for i in range(1, 6)), "rounded"]
    far_off = ["float32", "perturbed 1", "rounded"]  # no other draw would be so much larger
    needed = [[], every[:1], every[:6], every, far_off]
    for count, (step, limit) in enumerate(limits.items()):
        asked.clear()
        row = judged_by(ruler(), off_by(0.9 * limit))
        assert (row.status, row.widened_by, row.atol) == (PASS, step, pytest.approx(limit))
        assert asked == needed[count]
    assert judged_by(ruler(), off_by(1.1 * limit)).status == FAIL


def test_a_perturbed_run_is_asked_for_where_it_may_help():
    """Not far off, unless the float32 run has lost what it measures; nor where another precision has shown a fault."""
    asked = []

    def judge(difference: float, error: float, decided: tuple[Item, ...] = ()) -> list[int]:
        asked.clear()
        judged_by(Ruler(REF, errors=lambda: {OUT: error}, perturbed=ask, decided=decided), off_by(difference))
        return list(asked)

    def ask(i: int) -> dict[Item, float]:
        asked.append(i)
        return {OUT: 1e-6}

    assert judge(3e-9, 2.0**-17) == [1]
    assert judge(1e-6, 2.0**-17) == []
    assert judge(1e-6, 2.0**-14) == [1]
    assert judge(3e-9, 2.0**-17, (OUT,)) == []


def test_what_is_zero_by_structure_may_be_off_by_a_share_of_its_terms():
    """Of the largest gradient of the pass; what is no gradient has no terms."""
    weight, bias = tensor_item("a.weight", "gradient"), tensor_item("a.bias", "gradient")
    ref = {weight: np.array([100.0]), bias: np.array([1e-15])}
    for off, status in ((0.9e-10, PASS), (1.1e-10, FAIL)):
        rows = Ruler(ref).compare({weight: ref[weight], bias: ref[bias] + off}).rows
        assert [row.status for row in rows] == [PASS, status]


def test_an_update_carries_the_limit_of_its_gradient():
    gradient, parameter = tensor_item("a.bias", "gradient"), tensor_item("a.bias", "parameter")
    other = tensor_item("a.weight", "gradient")
    ref = {other: np.array([1000.0]), gradient: np.array([1.0]), parameter: np.array([5.0])}
    perturbed = {gradient: 1e-6}  # and so a limit of 8e-6, and of 8e-8 for an update of 0.01 times the gradient
    for update_scale, off, status in ((10.0, 7e-8, PASS), (10.0, 9e-8, FAIL), (0.0, 7e-8, FAIL)):
        ruler = Ruler(ref, perturbed=lambda i: perturbed, update_scale=update_scale)
        port = {other: ref[other], gradient: ref[gradient] + 7e-6, parameter: ref[parameter] + off}
        assert [row.status for row in ruler.compare(port).rows] == [PASS, PASS, status]


def test_what_overflows_in_float32_is_not_judged():
    ref = {OUT: np.array([1e36, 1.0], np.float32)}
    assert Ruler(ref, "float32").compare({OUT: np.float32([np.inf, 1.0])}).rows[0].status == NOT_JUDGED
    ref = {OUT: np.array([1e18, 1.0], np.float32)}
    assert Ruler(ref, "float32").compare({OUT: np.float32([np.inf, 1.0])}).rows[0].status == FAIL


@pytest.mark.parametrize(("inside", "status"), [(1e20, NOT_JUDGED), (1e18, FAIL)])
def test_where_the_square_of_a_value_inside_overflows_the_port_may_too(inside, status):
    """Of a variance, say, which one side computes of squares and the other of scaled values."""
    ref = {Item("block", "output", "block"): np.array([inside], np.float32), OUT: np.array([1.0, 0.5], np.float32)}
    rows = Ruler(ref, "float32").compare({**ref, OUT: np.float32([np.nan, 0.5])}).rows
    assert [row.status for row in rows] == [PASS, status]


@pytest.mark.parametrize(("distance", "status"), [(1.0, NOT_JUDGED), (0.1, FAIL)])
def test_where_the_references_own_float32_keeps_no_digit_the_port_may_overflow(distance, status):
    """A square of 1e20 is infinite in float32, in either framework, and what comes of it differs."""
    ref = {OUT: np.array([1.0, 0.5], np.float32)}
    ruler = Ruler(ref, "float32", errors=lambda: {OUT: distance})
    assert ruler.compare({OUT: np.float32([np.nan, 0.5])}).rows[0].status == status
    assert ruler.compare({OUT: np.float32([[np.nan, 0.5]])}).rows[0].status == FAIL  # of another shape


def test_a_limit_says_which_relative_change_could_hide_in_it():
    ruler = Ruler(REF, errors=lambda: {OUT: 1.0}, perturbed=lambda i: {OUT: 1e-3})
    assert judged_by(ruler, off_by(1e-13)).hidden == 0
    assert judged_by(ruler, off_by(1e-8)).hidden == 8 * 2.0**-53
    assert judged_by(ruler, off_by(1e-3)).hidden == 16 * 2.0**-53
    assert 16 * 2.0**-53 < MOST_HIDDEN < 1.01e-6


def test_what_could_hide_too_much_is_not_judged(monkeypatch):
    monkeypatch.setattr("portproof.compare.ruler.MOST_HIDDEN", 1e-16)
    row = judged_by(Ruler(REF, errors=lambda: {OUT: 1.0}), off_by(1e-9))
    assert row.status == NOT_JUDGED and "a relative change of 8.9e-16 could hide" in row.reason


def test_where_a_precision_keeps_no_digit_an_item_is_not_judged():
    """In float32 it is left to float64; in float64 the model's own output is refused."""
    lost = {"errors": lambda: {OUT: 1.0}}
    for difference in (0.5, 100.0):
        row = judged_by(Ruler(REF, "float32", **lost), off_by(difference))
        assert row.status == NOT_JUDGED and row.reason.startswith("float32 keeps no digit")
    perturbed = {"perturbed": lambda i: {OUT: 1.0}}
    assert judged_by(Ruler(REF, **perturbed), off_by(0.5)).status == NOT_JUDGED
    assert judged_by(Ruler(REF, **perturbed), off_by(100.0)).status == NOT_JUDGED
    assert judged_by(Ruler(REF, **perturbed), off_by(1e4)).status == FAIL
    assert judged_by(Ruler(REF, **perturbed, must_be_judged=[OUT]), off_by(0.5)).status == REFUSED


@pytest.mark.parametrize("port", [np.full(3, np.inf), np.full(3, 1e38)])
def test_what_must_be_judged_and_overflows_in_float32_is_refused(port):
    ref = {OUT: np.full(3, 1e38)}
    for must_be_judged, status in (((), NOT_JUDGED), ([OUT], REFUSED)):
        row = judged_by(Ruler(ref, "float32", must_be_judged=must_be_judged), {OUT: port})
        assert row.status == status and row.reason == OVERFLOWS


@pytest.mark.parametrize(("dtype", "vague"), [("float32", NOT_JUDGED), ("float64", PASS)])
def test_a_pass_in_float32_needs_a_digit_and_a_difference_above_the_limit_needs_none(dtype, vague):
    """REF's largest value is 4: within a float32 limit of 0.4 or more nothing is proved, and outside of it a fault is.

    A float64 limit says what could hide in it: 2e-15 of inputs and weights.
    """
    times = K + 1 if dtype == "float32" else S
    for limit, within in ((0.39, PASS), (0.41, vague), (3.9, vague)):
        ruler = Ruler(REF, dtype, perturbed={i: {OUT: limit / times} for i in range(1, RUNS + 1)}.get)
        assert judged_by(ruler, off_by(0.3 * limit)).status == within
        assert judged_by(ruler, off_by(1.1 * limit)).status == FAIL


def test_a_ruler_lets_go_of_the_references_arrays_without_a_collection_of_garbage():
    measures = {"errors": lambda: {OUT: 1e-9}, "perturbed": {1: {OUT: 1e-9}}.get, "rounded": lambda: [{OUT: 1e-9}]}
    gc.disable()
    try:
        ruler = Ruler(REF, **measures)
        assert ruler.compare(off_by(1e-8)).rows
        seen = weakref.ref(ruler)
        del ruler
        assert seen() is None
    finally:
        gc.enable()


def test_limits_in_float32():
    u = 2.0**-24
    ruler = partial(Ruler, REF, "float32", lambda: {OUT: 1e-5}, lambda i: {OUT: 1e-5 * i})
    for step, limit in (("", 16 * u * 4), ("float32", 16 * u * 4 + 5e-5), ("perturbed", 16 * u * 4 + 25e-5)):
        row = judged_by(ruler(), off_by(0.9 * limit))
        assert (row.status, row.widened_by, row.atol) == (PASS, step, pytest.approx(limit))
    assert judged_by(ruler(), off_by(1.1 * limit)).status == FAIL


def test_a_share_is_that_of_the_widest_limit_some_item_has_needed():
    near, far = Item("near", "output"), Item("far", "output")
    ref = {near: REF[OUT], far: REF[OUT]}
    least = 16 * 2.0**-24 * 4
    ruler = Ruler(ref, "float32", errors=lambda: {near: 1e-5, far: 1e-5})
    rows = ruler.compare({near: REF[OUT] + 0.99 * least, far: REF[OUT] + 2 * least}).rows
    assert [row.atol for row in rows] == pytest.approx([least, least + 5e-5])
    assert [row.limit for row in rows] == pytest.approx([least + 5e-5] * 2)
    assert rows[0].share == pytest.approx(0.99 * least / (least + 5e-5))
    assert [row.share for row in ruler.compare({**ref, far: REF[OUT] + 1}).rows][1] > 1


def test_what_is_exact_or_no_float_is_never_widened():
    count = Item("count", "buffer")
    ruler = Ruler({OUT: REF[OUT], count: np.array(3)}, errors=lambda: {OUT: 1e9, count: 1e9}, exact=[OUT])
    assert [row.status for row in ruler.compare({OUT: REF[OUT] + 1e-15, count: np.array(4)}).rows] == [FAIL, FAIL]


def test_distances_and_exact_limits():
    fp64_ref = {**REF, "n": np.array(3)}
    assert distances(fp64_ref, {OUT: REF[OUT] + 0.5, "n": np.array(4)}) == {OUT: 0.5, "n": 0.0}
    assert distances(fp64_ref, {OUT: np.zeros(3)}) == {}
    assert exact_atol(fp64_ref) == {OUT: 0.0, "n": 0.0}


def test_noise_floor():
    """A gradient's is of the largest of its pass; a running mean's of what came into its module; others have none."""
    of_a, of_b = (tensor_item(f"{name}.weight", "gradient") for name in "ab")
    mean, variance = (tensor_item(f"a.running_{what}", "buffer") for what in ("mean", "var"))
    first = {of_a: np.array([2.0]), of_b: np.array([-8.0]), mean: np.zeros(1), variance: np.ones(1)}
    second = placed({of_a: np.array([1.0])}, iteration=1)
    every = {**placed(first, iteration=0), **second}
    floors = noise_floor(every, U64, {"a": 5.0, "b": 7.0})
    here = [replace(item, iteration=0) for item in (of_a, of_b, mean)]
    unit = 16 * U64
    assert floors == {here[0]: 8 * unit, here[1]: 8 * unit, here[2]: 5 * unit, replace(of_a, iteration=1): unit}
    assert noise_floor(second, U64, upstream_scale=9.0) == {replace(of_a, iteration=1): 9 * unit}


def test_a_floor_counts_where_it_hides_little_or_all():
    """A gradient that is zero by structure passes; one a little above the noise is measured, and not waved through."""
    small, large = (tensor_item(f"{name}.weight", "gradient") for name in "ab")
    floor = 16 * U64
    for scale, status in ((0.5 * floor, PASS), (1e4 * floor, FAIL), (1e7 * floor, PASS)):
        ref = {small: np.array([scale]), large: np.array([1.0])}
        port = {small: np.array([scale + 0.9 * floor]), large: np.array([1.0])}
        assert Ruler(ref).compare(port).rows[0].status == status


def test_the_same_bits():
    x = np.array([[0.0, np.nan], [1.0, 2.0]])
    assert same_bits(x, x.copy()) and same_bits(x.T, x.T.copy()) and same_bits(x[:0], x[:0])
    for other in (x * -1, x.astype(np.float32), x[:1], np.where(x == 1, 1 + 2**-52, x)):
        assert not same_bits(x, other)
    assert not same_bits(np.zeros(2, complex), np.zeros(2, complex))


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_moves_of_a_constant_do_not_vanish_with_a_mean(dtype):
    """Of two numbers a row, whose moves would have one sign in half of the rows."""
    table = np.ones((1000, 2), dtype)
    moved = moved_by_rounding(table, np.random.default_rng(0)) - 1
    step = U * 1000
    assert step / 2 <= np.abs(moved.real).min() <= np.abs(moved.real).max() <= step
    left = moved.real - moved.real.mean(-1, keepdims=True)
    assert np.abs(left).max(-1).min() > step / 10_000
