"""Align two sequences at the least cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

SKIP = 1000  # per element left over
NEW_GAP = 1  # per gap in one parent: prefers to leave out a whole block
NEW_PARENT = 900  # if only one side's parent changes; less than a skip
MOST = 4  # parts of a join

State = tuple[int, int, int]  # (lengths so far, side skipped last or 0)


def align_sequences(
    ref_owners: Sequence[str], port_owners: Sequence[str], cost: Callable[[slice, slice], int | None]
) -> list[tuple[slice, slice]]:
    """(places, port's places) that are aligned, in order; one side is a single place.

    Owners are the parents. `cost` is None for a pair that cannot be. Dynamic
    programming: each state keeps its cheapest way; skips come late.
    """
    n, m = len(ref_owners), len(port_owners)
    steps = [(1, 1), *((1, k) for k in range(2, MOST + 1)), *((k, 1) for k in range(2, MOST + 1))]
    # cost, state before, pair, owners of the last pair
    best: dict[State, tuple] = {(0, 0, 0): (0, None, None, None)}

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
