"""Growth of scores with training: a line through each system's scores over the logarithm of the operations, and the
crossings of two lines.

The lines of a measure share one residual variance, which differences between seeds and bends in a curve both raise.
Intervals are from Student's t; the interval of a crossing is Fieller's (1954), which is exact for two such lines.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.9  # of all intervals


class Trend(NamedTuple):
    """score = `at_zero` + `slope` · log10(operations), with the covariance of the two and a quantile of Student's t."""

    at_zero: float
    slope: float
    covariance: np.ndarray
    quantile: float

    def at(self, log_flops: float) -> tuple[float, float]:
        """The score of the line at 10^`log_flops` operations, and half the interval of its mean."""
        direction = np.array([1.0, log_flops])
        half = self.quantile * math.sqrt(direction @ self.covariance @ direction)
        return self.at_zero + self.slope * log_flops, half

    @property
    def slope_half(self) -> float:
        """Half the interval of the slope."""
        return self.quantile * math.sqrt(self.covariance[1, 1])


class Crossing(NamedTuple):
    """The point where one line crosses another, as log10 of operations, with its interval.

    `overtakes`: the first line is the higher one after it.
    """

    at: float
    least: float
    most: float
    overtakes: bool


def trends(points: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Trend]:
    """A line for every system that has several budgets, from its (operations, score).

    Empty if the scores are not more than the parameters of the lines: then the residual variance is unknown.
    """
    lines: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    squares, freedom = 0.0, 0
    for name, values in points.items():
        x, y = np.log10([flops for flops, _ in values]), np.array([score for _, score in values])
        if len(x) == 0 or np.ptp(x) < 0.1:  # equal budgets differ a little: runs end at whole steps
            continue
        design = np.stack([np.ones_like(x), x], axis=1)
        line, *_ = np.linalg.lstsq(design, y, rcond=None)
        lines[name] = line, np.linalg.inv(design.T @ design)  # times the variance: the covariance
        squares += float(np.sum((y - design @ line) ** 2))
        freedom += len(x) - 2
    if freedom < 1:
        return {}
    variance, quantile = squares / freedom, student(freedom)
    return {
        name: Trend(float(line[0]), float(line[1]), variance * inverse, quantile)
        for name, (line, inverse) in lines.items()
    }


def crossing(first: Trend, other: Trend) -> Crossing | None:
    """The crossing of `first` and `other`. None if the slopes do not differ significantly: the lines may then cross
    anywhere, or nowhere."""
    at_zero, slope = first.at_zero - other.at_zero, first.slope - other.slope
    (a, b), (_, c) = first.quantile**2 * (first.covariance + other.covariance)
    # x is log10 of the operations. All x at which 0 is in the interval of the difference:
    # (at_zero + slope x)² ≤ a + 2 b x + c x².
    square, linear, constant = slope**2 - c, at_zero * slope - b, at_zero**2 - a
    if square <= 0:
        return None
    root = math.sqrt(max(linear**2 - square * constant, 0.0))
    return Crossing(-at_zero / slope, (-linear - root) / square, (-linear + root) / square, slope > 0)


@functools.cache
def student(freedom: int, level: float = LEVEL) -> float:
    """The bound that |t| of Student's distribution with ν = `freedom` does not exceed with probability `level`.

    With t = √ν tan θ the density is proportional to cos^(ν - 1) θ.
    """
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    integral = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])  # by the trapezoid rule
    return math.sqrt(freedom) * math.tan(np.interp(level, integral / integral[-1], angles))
