"""Values that no flag can mean: each command ends in one line and status 2, at once, whatever it is given."""

import random

import pytest
from started_commands import NAMES, commands, lines_in, parser_of, started

HOSTILE = (
    *("", "-1", "0", "1", "4294967296", "-9223372036854775809", "99999999999999999999", "1e400", "nan", "-inf", "0x10"),
    *("\x1b[31m", "a\nb", "n" * 300, "\u4f60\u597d", "/", ".", "{[]: 1}", "[]", "None", "x=y", "=", "a:b(c={[]: 1})"),
    *("2,3:int64:9223372036854775809", "99999,99999,99999", ",".join("1" * 80), "2,3:float99", "torch.nn:ReLU(1)"),
)
DRAWS = 60  # for each command


def drawn_flags(name: str, draws: random.Random) -> tuple[str, ...]:
    """The command's flags, of files that are not there, and one or two more with values that it may not expect."""
    actions = [action for action in parser_of(name.strip())._actions if action.option_strings and action.nargs != 0]
    flags = list(commands("file/below")[name])
    for action in draws.sample(actions, min(len(actions), draws.randint(1, 2))):
        count = action.nargs if isinstance(action.nargs, int) else 1
        flags += [action.option_strings[0], *(draws.choice(HOSTILE) for _ in range(count))]
    return tuple(flags)


@pytest.mark.thorough("two commands", but="predict|new")
@pytest.mark.parametrize("name", NAMES)
def test_values_drawn_for_every_flag_end_in_one_line(tmp_path, name):
    draws = random.Random(name)
    (tmp_path / "file").touch()  # so that nothing can be below
    for _ in range(DRAWS):
        flags = drawn_flags(name, draws)
        status, lines = lines_in(tmp_path, started(name.strip(), flags), as_nobody=False)
        assert (status, len(lines)) == (2, 1), (flags, lines)
        assert lines[0].isprintable()
