"""What a run's report is drawn from: curves that stay small however long the run is.

values   v v v v v v v v v v v v ...
points   [mean of n] [mean of n] ...     n doubles when there are MOST of them
"""

from __future__ import annotations

import math

MOST = 600  # more than a chart has pixels for; even


class Curve:
    """Means of equally long stretches of what was added, in order."""

    __slots__ = ("_num", "_points", "_x", "_y", "every", "num_not_finite")

    def __init__(self) -> None:
        self.every = 1  # values a point
        self.num_not_finite = 0
        self._points: list[tuple[float, float]] = []
        self._num, self._x, self._y = 0, 0.0, 0.0  # of the point to come

    def add(self, x: float, y: float) -> None:
        """Add one value; one that is not finite is counted, not drawn."""
        if not math.isfinite(y):
            self.num_not_finite += 1
            return
        self._num += 1
        self._x += x
        self._y += y
        if self._num < self.every:
            return
        self._points.append((self._x / self._num, self._y / self._num))
        self._num, self._x, self._y = 0, 0.0, 0.0
        if len(self._points) >= MOST:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs]
            self.every *= 2

    def points(self) -> list[tuple[float, float]]:
        """Return the points so far, and that of the stretch that has begun."""
        if not self._num:
            return list(self._points)
        return [*self._points, (self._x / self._num, self._y / self._num)]


class History:
    """Curves by name, over steps or over seconds."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}

    def add(self, name: str, x: float, y: float) -> None:
        """Add a value to a curve, which begins with its first."""
        self._curves.setdefault(name, Curve()).add(x, y)

    def names(self) -> list[str]:
        """Return the names of all curves, the oldest first."""
        return list(self._curves)

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return the points of a curve; none if it has not begun."""
        curve = self._curves.get(name)
        return [] if curve is None else curve.points()

    def num_not_finite(self, name: str) -> int:
        """Return how many of its values were not finite."""
        curve = self._curves.get(name)
        return 0 if curve is None else curve.num_not_finite
