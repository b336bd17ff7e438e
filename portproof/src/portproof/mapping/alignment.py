"""The cheapest way to put two sequences side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

SKIP = 1000  # for each one left over
NEW_GAP = 1  # for the first of several left over that have one parent: of equal ways that which leaves out a block
NEW_PARENT = 900  # where the parent changes from one pair to the next on one side only: less than leaving a pair out
MOST = 4  # that one may be joined from

State = tuple[int, int, int]  # lengths of the beginnings, which side was left over last: 1, 2, or 0 for none


def align_sequences(
    ref_owners: Sequence[str], port_owners: Sequence[str], cost: Callable[[slice, slice], int | None]
) -> list[tuple[slice, slice]]:
    """(places in the first sequence, places in the second) that stand for each other, in order; one side is one place.

    The sequences are given by each one's parent. `cost` says what a pair, or one against several in turn, costs; None:
    it cannot be. Dynamic programming over the beginnings of both: for each the cheapest way by which side was left
    over last, of which the owners of its last pair are kept. Of equal ways that in which what is left over comes late.
    """
    n, m = len(ref_owners), len(port_owners)
    steps = [(1, 1), *((1, k) for k in range(2, MOST + 1)), *((k, 1) for k in range(2, MOST + 1))]
    best: dict[State, tuple] = {(0, 0, 0): (0, None, None, None)}  # cost, state before, pair, owners of the last pair

    def offer(state: State, price: int, *rest: object) -> None:
        if state not in best or price < best[state][0]:
            best[state] = (price, *rest)

    def late_first(i: int, j: int) -> list[State]:
        return [(i, j, last) for last in (2, 1, 0) if (i, j, last) in best]

    for i, j in product(range(n + 1), range(m + 1)):
        pairs = [(slice(i, i + down), slice(j, j + right)) for down, right in steps if i + down <= n and j + right <= m]
        costs = [(pair, cost(*pair)) for pair in pairs]
        for state in late_first(i, j):
            price, _, _, owners = best[state]
            for pair, more in costs:
                if more is not None:
                    now = ref_owners[i], port_owners[j]
                    changed = owners and (owners[0] == now[0]) != (owners[1] == now[1])
                    place = pair[0].stop, pair[1].stop, 0
                    offer(place, price + more + NEW_PARENT * bool(changed), state, pair, now)
            if i < n:
                goes_on = state[2] == 1 and ref_owners[i] == ref_owners[i - 1]
                offer((i + 1, j, 1), price + SKIP + NEW_GAP * (not goes_on), state, None, owners)
            if j < m:
                goes_on = state[2] == 2 and port_owners[j] == port_owners[j - 1]
                offer((i, j + 1, 2), price + SKIP + NEW_GAP * (not goes_on), state, None, owners)
    found, state = [], min(late_first(n, m), key=lambda state: best[state][0])
    while state != (0, 0, 0):
        _, state, pair, _ = best[state]
        if pair:
            found.append(pair)
    return found[::-1]
