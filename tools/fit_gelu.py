"""Fit the odd polynomial p of ``minice.engines.numpy_engine``: tanh(p(x)) = erf(x / sqrt(2)).

Minimizes the largest |x| / 2 * |tanh(p(x)) - erf(x / sqrt(2))|, the absolute error of the GELU, by Lawson's
reweighting of a nonlinear least-squares fit, and prints the coefficients of x, x**3, ... with their error.

Needs scipy: python tools/fit_gelu.py [TERMS]
"""

import sys

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares  # type: ignore[import-untyped]  # scipy carries no types
from scipy.special import erfc  # type: ignore[import-untyped]

Vector = NDArray[np.float64]

# Scaling x**2 by 16 keeps the columns of the fit of one size.
_SQUARE_SCALE = 16.0


def gelu_error(x: Vector, scaled: Vector) -> Vector:
    """Signed error of the GELU; written with 1 - tanh so that nothing cancels where erf is nearly 1."""
    p = x * np.polynomial.polynomial.polyval(x * x / _SQUARE_SCALE, scaled)
    error: Vector = x / 2 * (2 / (1 + np.exp(np.clip(2 * p, -700, 700))) - erfc(x / np.sqrt(2)))
    return error


def fit(terms: int, *, rounds: int = 120) -> tuple[float, Vector]:
    """Return the largest error and the coefficients of x, x**3, ... for that many terms."""
    x = np.linspace(1e-4, 8, 8001)
    scaled = np.zeros(terms)
    scaled[:3] = 0.7975, 0.0370 * _SQUARE_SCALE, -3.5e-4 * _SQUARE_SCALE**2
    weights = np.ones_like(x)
    best = (np.inf, scaled)
    for round_ in range(rounds):
        solution = least_squares(
            lambda c, w=weights: gelu_error(x, c) * np.sqrt(w) * 1e4,
            scaled,
            x_scale="jac",
            max_nfev=20 if round_ else 200,
            xtol=1e-15,
            ftol=1e-15,
            gtol=1e-15,
        )
        scaled = solution.x
        error = np.abs(gelu_error(x, scaled))
        best = min(best, (float(error.max()), scaled.copy()), key=lambda entry: entry[0])
        weights = weights * (error / error.max() + 1e-4) ** 0.7
        weights /= weights.max()
    return best[0], best[1] / _SQUARE_SCALE ** np.arange(terms)


if __name__ == "__main__":
    largest, coefficients = fit(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
    print(f"largest absolute error of the GELU: {largest:.3g}")
    for power, coefficient in enumerate(coefficients):
        print(f"x**{2 * power + 1}: {coefficient!r}")
