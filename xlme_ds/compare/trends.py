"""Trends of scores with training: a straight line through each system's scores over log10 of the operations, and the
crossings of two lines.

The lines that are fitted in one call share one residual variance. Differences between seeds raise this variance, and so
do scores that do not follow a straight line. Intervals are from Student's t; the interval of a crossing is Fieller's
(1954), which is exact for two lines that share a residual variance.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE_LEVEL = 0.9  # confidence level of all intervals


class Trend(NamedTuple):
    """The line score = `intercept` + `slope` · log10(operations)."""

    intercept: float
    slope: float
    covariance: np.ndarray  # covariance matrix of `intercept` and `slope`, [2, 2]
    quantile: float  # quantile of Student's t: half of an interval is this many standard errors

    def at(self, log10_flops: float) -> tuple[float, float]:
        """The score of the line at 10^`log10_flops` operations, and half of this score's interval."""
        weights = np.array([1.0, log10_flops])
        half = self.quantile * math.sqrt(weights @ self.covariance @ weights)
        return self.intercept + self.slope * log10_flops, half

    @property
    def slope_half_width(self) -> float:
        """Half of the slope's interval."""
        return self.quantile * math.sqrt(self.covariance[1, 1])


class Crossing(NamedTuple):
    """The point where the first of two lines crosses the other one, in log10 of operations."""

    log10_flops: float
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    overtakes: bool  # whether the first line is above the other one after the crossing


def trends(points: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Trend]:
    """A line for every system whose runs differ in their operations, fitted to (operations, score) of each run.

    The dict is empty if the lines have as many parameters as there are scores, because the residual variance is then
    unknown.
    """
    # system -> (parameters of its line [2], inverse of the normal matrix [2, 2])
    lines: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    squared_residuals, dof = 0.0, 0
    for name, values in points.items():
        x, y = np.log10([flops for flops, _ in values]), np.array([score for _, score in values])
        if len(x) == 0 or np.ptp(x) < 0.1:  # equal operations, up to rounding to whole steps
            continue
        design = np.stack([np.ones_like(x), x], axis=1)
        parameters, *_ = np.linalg.lstsq(design, y, rcond=None)
        lines[name] = parameters, np.linalg.inv(design.T @ design)
        squared_residuals += float(np.sum((y - design @ parameters) ** 2))
        dof += len(x) - 2
    if dof < 1:
        return {}
    variance, quantile = squared_residuals / dof, t_quantile(dof)
    return {
        name: Trend(float(parameters[0]), float(parameters[1]), variance * inverse, quantile)
        for name, (parameters, inverse) in lines.items()
    }


def crossing(first: Trend, other: Trend) -> Crossing | None:
    """The crossing of `first` and `other`. None if the slopes do not differ significantly, because the lines may then
    cross anywhere, or nowhere."""
    intercept, slope = first.intercept - other.intercept, first.slope - other.slope
    (a, b), (_, c) = first.quantile**2 * (first.covariance + other.covariance)
    # With x = log10 of the operations, the interval of the crossing is all x at which the interval of the two lines'
    # difference contains 0: (intercept + slope x)² ≤ a + 2 b x + c x², which is square x² + 2 linear x + constant ≤ 0.
    square, linear, constant = slope**2 - c, intercept * slope - b, intercept**2 - a
    if square <= 0:
        return None
    root = math.sqrt(max(linear**2 - square * constant, 0.0))
    return Crossing(-intercept / slope, (-linear - root) / square, (-linear + root) / square, slope > 0)


@functools.cache
def t_quantile(dof: int, level: float = CONFIDENCE_LEVEL) -> float:
    """The bound that |t| does not exceed with probability `level`, for Student's t with ν = `dof` degrees of freedom.

    With t = √ν tan θ, the density of θ is proportional to cos^(ν - 1) θ.
    """
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (dof - 1)
    integral = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])  # by the trapezoid rule
    return math.sqrt(dof) * math.tan(np.interp(level, integral / integral[-1], angles))
