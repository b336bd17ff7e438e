"""The cheapest way to put two sequences side by side: what stands for what, and what is left over on either side."""

from collections.abc import Callable, Sequence

SKIP = 1.0  # for each one left over
NEW_GAP = (
    1e-3  # for the first of those left over in turn that have one parent: of equal ways, one that leaves out a block
)
MOST = 4  # that one may be joined from

Places = tuple[tuple[int, ...], tuple[int, ...]]


def align(
    ref_parents: Sequence[str],
    port_parents: Sequence[str],
    cost: Callable[[tuple[int, ...], tuple[int, ...]], float | None],
) -> list[Places]:
    """(places in the first sequence, places in the second) that stand for each other, in order; one side is one place.

    The sequences are given by each one's parent. `cost` says what a pair, or one against several in turn, costs; None:
    it cannot be. Dynamic programming over the beginnings of both, by what was left over last.
    """
    n, m = len(ref_parents), len(port_parents)
    steps = [(1, 1), *((1, k) for k in range(2, MOST + 1)), *((k, 1) for k in range(2, MOST + 1))]
    # best[i][j]: {side left over last, 0 for none: (cost, where it came from, places paired)}
    best: list[list[dict[int, tuple]]] = [[{} for _ in range(m + 1)] for _ in range(n + 1)]
    best[0][0][0] = (0.0, None, None)

    def offer(i: int, j: int, last: int, price: float, origin: tuple, pair: Places | None) -> None:
        if last not in best[i][j] or price < best[i][j][last][0]:
            best[i][j][last] = (price, origin, pair)

    for i in range(n + 1):
        for j in range(m + 1):
            if not best[i][j]:
                continue
            last, (price, *_) = min(best[i][j].items(), key=lambda item: item[1][0])
            for down, right in steps:
                if i + down <= n and j + right <= m:
                    pair = tuple(range(i, i + down)), tuple(range(j, j + right))
                    more = cost(*pair)
                    if more is not None:
                        offer(i + down, j + right, 0, price + more, (i, j, last), pair)
            for last, (price, *_) in best[i][j].items():
                if i < n:
                    goes_on = last == 1 and ref_parents[i] == ref_parents[i - 1]
                    offer(i + 1, j, 1, price + SKIP + NEW_GAP * (not goes_on), (i, j, last), None)
                if j < m:
                    goes_on = last == 2 and port_parents[j] == port_parents[j - 1]
                    offer(i, j + 1, 2, price + SKIP + NEW_GAP * (not goes_on), (i, j, last), None)
    found, place = [], (n, m, min(best[n][m], key=lambda last: best[n][m][last][0]))
    while place != (0, 0, 0):
        _, origin, pair = best[place[0]][place[1]][place[2]]
        if pair:
            found.append(pair)
        place = origin
    return found[::-1]
