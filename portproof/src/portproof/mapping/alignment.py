"""The cheapest way to put two sequences side by side: what stands for what, and what is left over on either side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

SKIP = 1000  # for each one left over
NEW_GAP = 1  # for the first of several left over that have one parent: of equal ways that which leaves out a block
NEW_PARENT = 900  # where the parent changes from one pair to the next on one side only: less than leaving a pair out
MOST = 4  # that one may be joined from

Places = tuple[tuple[int, ...], tuple[int, ...]]


def align_sequences(
    ref_owners: Sequence[str],
    port_owners: Sequence[str],
    cost: Callable[[tuple[int, ...], tuple[int, ...]], int | None],
) -> list[Places]:
    """(places in the first sequence, places in the second) that stand for each other, in order; one side is one place.

    The sequences are given by each one's parent. `cost` says what a pair, or one against several in turn, costs; None:
    it cannot be. Dynamic programming over the beginnings of both: for each the cheapest way by which side was left
    over last, of which the owners of its last pair are kept. Of equal ways that in which what is left over comes late.
    """
    n, m = len(ref_owners), len(port_owners)
    steps = [(1, 1), *((1, k) for k in range(2, MOST + 1)), *((k, 1) for k in range(2, MOST + 1))]
    # best[i][j]: {side left over last, 0 for none: (cost, where it came from, places paired, owners of the last pair)}
    best: list[list[dict[int, tuple]]] = [[{} for _ in range(m + 1)] for _ in range(n + 1)]
    best[0][0][0] = (0, None, None, None)

    def offer(i: int, j: int, last: int, price: int, *rest: object) -> None:
        if last not in best[i][j] or price < best[i][j][last][0]:
            best[i][j][last] = (price, *rest)

    def late_first(i: int, j: int) -> list[tuple[int, tuple]]:
        return sorted(best[i][j].items(), reverse=True)

    def pairs_from(i: int, j: int) -> None:
        for down, right in steps:
            if i + down > n or j + right > m:
                continue
            pair = tuple(range(i, i + down)), tuple(range(j, j + right))
            more = cost(*pair)
            for last, (price, _, _, owners) in late_first(i, j) if more is not None else ():
                now = ref_owners[i], port_owners[j]
                changed = owners and (owners[0] == now[0]) != (owners[1] == now[1])
                offer(i + down, j + right, 0, price + more + NEW_PARENT * bool(changed), (i, j, last), pair, now)

    for i in range(n + 1):
        for j in range(m + 1):
            pairs_from(i, j)
            for last, (price, _, _, owners) in late_first(i, j):
                if i < n:
                    goes_on = last == 1 and ref_owners[i] == ref_owners[i - 1]
                    offer(i + 1, j, 1, price + SKIP + NEW_GAP * (not goes_on), (i, j, last), None, owners)
                if j < m:
                    goes_on = last == 2 and port_owners[j] == port_owners[j - 1]
                    offer(i, j + 1, 2, price + SKIP + NEW_GAP * (not goes_on), (i, j, last), None, owners)
    found, place = [], (n, m, min(late_first(n, m), key=lambda item: item[1][0])[0])
    while place != (0, 0, 0):
        _, origin, pair, _ = best[place[0]][place[1]][place[2]]
        if pair:
            found.append(pair)
        place = origin
    return found[::-1]
