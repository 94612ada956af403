"""The choice of an input's scale, against searches and histograms written out here."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvgraph.quant.activation_ranges import choose_scale
from kvgraph.quant.formats import Floats
from kvgraph.quant.scheme import ActivationClip, ActivationScheme

MAXIMUM = {"int8": 127.0, "float8_e4m3fn": 448.0}
# The grid of the searches: a hundredth of the range.
GRID = 0.011


def scale_of(values: Floats, clip: ActivationClip, form: str = "int8") -> float:
    return choose_scale(values, float(np.abs(values).max()), ActivationScheme(form, "tensor", clip))


def rounded(values: Floats, scale: float, form: str) -> Floats:
    scaled = np.clip(values / scale, -MAXIMUM[form], MAXIMUM[form])
    codes = np.rint(scaled) if form == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    result: Floats = codes * scale
    return result


@pytest.fixture(scope="module")
def heavy_tailed() -> Floats:
    """Many small values and a few that are large, as activations are."""
    values: Floats = np.random.default_rng(0).standard_t(3, (256, 64)).astype(np.float32)
    return values


@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn"])
def test_absmax_reaches_the_largest_value(heavy_tailed: Floats, form: str) -> None:
    largest = float(np.abs(heavy_tailed).max())
    assert scale_of(heavy_tailed, "absmax", form) == pytest.approx(largest / MAXIMUM[form])
    # That may be one of the tokens that were not kept.
    assert choose_scale(heavy_tailed, 1000.0, ActivationScheme(form, "tensor")) == pytest.approx(
        1000 / MAXIMUM[form]
    )


def test_percentile_leaves_one_value_in_ten_thousand_out(heavy_tailed: Floats) -> None:
    limit = scale_of(heavy_tailed, "percentile") * 127
    outside = np.count_nonzero(np.abs(heavy_tailed) > limit)
    assert outside == pytest.approx(heavy_tailed.size / 10000, abs=1)


def test_mse_has_the_least_error(heavy_tailed: Floats) -> None:
    largest = float(np.abs(heavy_tailed).max())
    found = scale_of(heavy_tailed, "mse")
    errors = {
        share: np.square(rounded(heavy_tailed, largest * share / 127, "int8") - heavy_tailed).sum()
        for share in np.linspace(0.05, 1, 400)
    }
    best = min(errors, key=lambda share: errors[share])
    assert found * 127 / largest == pytest.approx(best, abs=GRID)
    assert 0.1 < best < 0.95


def test_mse_clips_no_format_whose_steps_grow(heavy_tailed: Floats) -> None:
    """E4M3's error is relative: a narrower range only loses the largest values."""
    found = scale_of(heavy_tailed, "mse", "float8_e4m3fn")
    exact = scale_of(heavy_tailed, "absmax", "float8_e4m3fn")
    errors = [
        np.square(rounded(heavy_tailed, scale, "float8_e4m3fn") - heavy_tailed).sum()
        for scale in (found, exact)
    ]
    assert errors[0] <= errors[1]
    assert 0.5 * exact < found <= exact


def reference_divergence(magnitudes: Floats, limit: float, levels: int, bins: int = 2048) -> float:
    """KL of the clipped distribution from the rounded one, bin by bin and level by level."""
    counts, _ = np.histogram(magnitudes[magnitudes > 0], bins=bins, range=(0, float(magnitudes.max())))
    used = max(1, round(bins * limit / float(magnitudes.max())))
    reference = counts[:used].astype(float)
    reference[-1] += counts[used:].sum()
    candidate = np.zeros(used)
    centres = (np.arange(used) + 0.5) * levels / used
    for level in range(levels + 1):
        members = [at for at in range(used) if round(centres[at]) == level and counts[at] > 0]
        for at in members:
            candidate[at] = counts[members].sum() / len(members)
    reference, candidate = reference / reference.sum(), candidate / candidate.sum()
    seen = reference > 0
    return float((reference[seen] * np.log(reference[seen] / np.maximum(candidate[seen], 1e-6))).sum())


def test_entropy_has_the_least_divergence(heavy_tailed: Floats) -> None:
    magnitudes = np.abs(heavy_tailed)
    largest = float(magnitudes.max())
    found = scale_of(heavy_tailed, "entropy") * 127
    divergences = {
        share: reference_divergence(magnitudes, largest * share, 127) for share in (0.1, 0.3, 0.5, 0.7, 1.0)
    }
    at_found = reference_divergence(magnitudes, found, 127)
    assert at_found <= min(divergences.values()) + 1e-9


@pytest.mark.parametrize("clip", ["percentile", "entropy"])
def test_distributions_pass_over_a_stray_value(clip: ActivationClip) -> None:
    values: Floats = np.random.default_rng(1).normal(size=(512, 64)).astype(np.float32)
    plain = scale_of(values, clip)
    values[0, 0] = 40.0
    assert scale_of(values, clip) < 3 * plain


@pytest.mark.parametrize("clip", ["absmax", "percentile", "mse", "entropy"])
@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn"])
def test_inputs_that_are_never_active_get_a_usable_scale(clip: ActivationClip, form: str) -> None:
    zeros = np.zeros((16, 8), np.float32)
    scheme = ActivationScheme(form, "tensor", clip)
    assert choose_scale(zeros, 0.0, scheme) == 1.0
    # Active, but in none of the tokens that were kept.
    assert choose_scale(zeros, 3.0, scheme) == pytest.approx(3.0 / MAXIMUM[form])
    # One value in many: the percentile of what is mostly zero is zero.
    sparse = zeros.repeat(4000, axis=0)
    sparse[0, 0] = 2.0
    scale = choose_scale(sparse, 2.0, scheme)
    assert np.isfinite(scale)
    assert scale > 0


@pytest.mark.parametrize("clip", ["absmax", "percentile", "mse", "entropy"])
def test_tiny_and_huge_values_keep_their_scale(clip: ActivationClip) -> None:
    values: Floats = np.random.default_rng(2).normal(size=(128, 32)).astype(np.float32)
    middle = scale_of(values, clip)
    for factor in (1e-20, 1e20):
        assert scale_of(values * np.float32(factor), clip) == pytest.approx(middle * factor, rel=0.03)
