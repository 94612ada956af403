"""Round-to-nearest: a weight matrix to codes and scales, and back.

Scales are rounded to the type that the graph stores before any value is rounded by them, so that the codes are the
nearest ones under the scales that a runtime will really use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvgraph.quant.formats import FORMATS, Floats, NumberFormat
from kvgraph.quant.scheme import WeightScheme

E4M3_MAXIMUM = FORMATS["float8_e4m3fn"].maximum
# Shares of the full range that clip="mse" tries.
CLIP_RATIOS = tuple(float(ratio) for ratio in np.linspace(1.0, 0.6, 17))


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Codes and scales of a matrix [I, O], inputs first.

    Attributes:
        scheme: How it was rounded.
        codes: [I, O] in the format's type.
        scale: [O], or [blocks, O]: float32 that hold values of the stored type; NVFP4: E4M3 values. Where the block
            size does not divide I, the last block is a short one.
        zero_point: Like `scale`, in the format's type; None for symmetric formats.
        global_scale: NVFP4's one float32 factor of all scales, else None.
        scale_dtype: The graph's compute type.
    """

    scheme: WeightScheme
    codes: NDArray[np.generic]
    scale: Floats
    zero_point: NDArray[np.generic] | None
    global_scale: np.float32 | None
    scale_dtype: np.dtype[np.generic]

    def dequantize(self) -> Floats:
        """(codes - zero point) * scale, [I, O] float32."""
        scale = combined_scale(self.scale, self.global_scale, self.scale_dtype)
        codes = self.codes.astype(np.float32)
        if self.zero_point is not None:
            codes -= self._spread(self.zero_point.astype(np.float32))
        return codes * self._spread(scale)

    def _spread(self, per_block: Floats) -> Floats:
        """[O] or [blocks, O] repeated to [I, O]."""
        size = self.scheme.block_size
        return per_block if size is None else np.repeat(per_block, size, axis=0)[: len(self.codes)]


def quantize_weight(
    weight: Floats,
    scheme: WeightScheme,
    scale_dtype: np.dtype[np.generic],
    largest: float | None = None,
    inputs: Floats | None = None,
) -> QuantizedWeight:
    """Round a matrix to nearest.

    Args:
        weight: [I, O] float32, finite.
        scheme: Format, granularity and clipping.
        scale_dtype: Type that the graph stores scales in (NVFP4 stores its own).
        largest: Largest magnitude of the matrix that `weight` is a part of, which fixes NVFP4's global scale; default
            that of `weight`.
        inputs: [R, I] that the matrix multiplies; clip="mse" then looks at the error of the outputs, block by block.

    Raises:
        ValueError: The matrix is not finite.
    """
    if not np.isfinite(weight).all():
        raise ValueError(f"weight [{weight.shape[0]}, {weight.shape[1]}] holds NaN or infinite values")
    return quantize_finite(weight, scheme, scale_dtype, largest, inputs)


def quantize_finite(
    weight: Floats,
    scheme: WeightScheme,
    scale_dtype: np.dtype[np.generic],
    largest: float | None = None,
    inputs: Floats | None = None,
) -> QuantizedWeight:
    """`quantize_weight` of a matrix that is known to be finite."""
    blocks = _blocks(weight, scheme.block_size)
    sides = None if inputs is None else _input_blocks(inputs, blocks.shape[1])
    scale, zero_point, global_scale = choose_scales(blocks, scheme, scale_dtype, largest, sides)
    codes = round_blocks(blocks, scheme, combined_scale(scale, global_scale, scale_dtype), zero_point)
    codes = codes.reshape(-1, weight.shape[1])[: len(weight)]
    if scheme.block_size is None:
        scale, zero_point = scale[0], None if zero_point is None else zero_point[0]
    stored_zero = None if zero_point is None else zero_point.astype(FORMATS[scheme.format].element)
    return QuantizedWeight(scheme, codes, scale, stored_zero, global_scale, scale_dtype)


def choose_channel_scales(
    extremes: Floats, scheme: WeightScheme, scale_dtype: np.dtype[np.generic]
) -> QuantizedWeight:
    """The scales and zero points of a matrix without blocks, and no codes yet.

    Args:
        extremes: [R, O], among them the least and the largest value of each output.
        scheme: Without blocks, and with clip="absmax".
        scale_dtype: Type that the graph stores scales in.
    """
    return quantize_finite(extremes, scheme, scale_dtype)


def round_channels(band: Floats, scales: QuantizedWeight) -> QuantizedWeight:
    """Some inputs [r, O] of a matrix whose scales are chosen."""
    scale = combined_scale(scales.scale, scales.global_scale, scales.scale_dtype)
    zero_point = None if scales.zero_point is None else scales.zero_point.astype(np.float32)[None]
    codes = round_blocks(band[None], scales.scheme, scale[None], zero_point)
    return replace(scales, codes=codes[0])


def choose_scales(
    blocks: Floats,
    scheme: WeightScheme,
    scale_dtype: np.dtype[np.generic],
    whole_largest: float | None = None,
    inputs: Floats | None = None,
) -> tuple[Floats, Floats | None, np.float32 | None]:
    """Scales, zero points and global scale of blocks [G, block, O]; scales and zero points are [G, O] float32.

    `inputs` [G, R, block], where there are any, are what the blocks multiply.
    """
    if FORMATS[scheme.format].asymmetric:
        scale, zero_point = _asymmetric(blocks, scheme, scale_dtype, inputs)
        return scale, zero_point, None
    form = FORMATS[scheme.format]
    largest = np.abs(blocks).max(axis=1)
    if scheme.scale_form == "power_of_two":
        return _power_of_two(largest, form, scale_dtype), None, None
    if scheme.scale_form == "float8_e4m3fn":
        peak = float(largest.max()) if whole_largest is None else whole_largest
        global_scale = np.float32(max(peak, 1e-30) / (form.maximum * E4M3_MAXIMUM))
        scale = largest / (form.maximum * global_scale)
        e4m3 = FORMATS["float8_e4m3fn"].round(scale).astype(np.float32)
        # The least positive E4M3 value where a block would get none.
        return np.maximum(e4m3, np.float32(2.0**-9)), None, global_scale
    if scheme.clip == "absmax":
        return stored_scale(largest / form.maximum, scale_dtype), None, None
    return _least_squares(blocks, largest, scheme, scale_dtype, inputs), None, None


def round_blocks(
    blocks: Floats, scheme: WeightScheme, scale: Floats, zero_point: Floats | None
) -> NDArray[np.generic]:
    """The codes [G, block, O] nearest to `blocks` under scales [G, O]."""
    return FORMATS[scheme.format].round(_scaled(blocks, scale, zero_point))


def combined_scale(scale: Floats, global_scale: np.float32 | None, dtype: np.dtype[np.generic]) -> Floats:
    """What a code is multiplied by: with NVFP4 scale times global scale, rounded to the graph's compute type."""
    if global_scale is None:
        return scale
    return (scale * global_scale).astype(dtype).astype(np.float32)


def stored_scale(scale: Floats, dtype: np.dtype[np.generic]) -> Floats:
    """Scales rounded to `dtype`, in float32; 1 for an all-zero channel."""
    return np.where(scale > 0, _positive(scale, dtype), np.float32(1.0))


def _positive(scale: Floats, dtype: np.dtype[np.generic]) -> Floats:
    """Rounded to `dtype`, and its least usable value where that gives less."""
    least = np.float32(2.0 ** _exponents(dtype)[0])
    return np.maximum(scale.astype(dtype).astype(np.float32), least)


def _exponents(dtype: np.dtype[np.generic]) -> tuple[int, int]:
    """Exponents of the least and the largest power of two that a scale may be.

    float16 needs its subnormal numbers; those of the other types may be flushed to zero, by this process, too: ONNX
    Runtime sets its threads so, the one that opens a session among them.
    """
    return (-24, 15) if dtype == np.float16 else (-126, 127)


def _asymmetric(
    blocks: Floats, scheme: WeightScheme, scale_dtype: np.dtype[np.generic], inputs: Floats | None
) -> tuple[Floats, Floats]:
    """Scale and zero point that map [min, max], widened to hold 0, onto the format's codes."""
    levels = np.float32(FORMATS[scheme.format].maximum)
    low, high = np.minimum(blocks.min(axis=1), 0), np.maximum(blocks.max(axis=1), 0)
    best_scale = stored_scale((high - low) / levels, scale_dtype)
    best_zero = np.clip(np.rint(-low / best_scale), 0, levels)
    if scheme.clip == "absmax":
        return best_scale, best_zero
    best_error = _squared_error(blocks, scheme, best_scale, best_zero, inputs)
    for ratio in CLIP_RATIOS[1:]:
        scale = stored_scale((high - low) * np.float32(ratio) / levels, scale_dtype)
        zero = np.clip(np.rint(-low * np.float32(ratio) / scale), 0, levels)
        error = _squared_error(blocks, scheme, scale, zero, inputs)
        better = error < best_error
        best_scale, best_zero = np.where(better, scale, best_scale), np.where(better, zero, best_zero)
        best_error = np.where(better, error, best_error)
    return best_scale, best_zero


def _least_squares(
    blocks: Floats,
    largest: Floats,
    scheme: WeightScheme,
    scale_dtype: np.dtype[np.generic],
    inputs: Floats | None,
) -> Floats:
    """The scale of each block with the least squared error among `CLIP_RATIOS` of the full range."""
    form = FORMATS[scheme.format]
    best = stored_scale(largest / form.maximum, scale_dtype)
    best_error = _squared_error(blocks, scheme, best, None, inputs)
    for ratio in CLIP_RATIOS[1:]:
        scale = stored_scale(largest * np.float32(ratio) / form.maximum, scale_dtype)
        error = _squared_error(blocks, scheme, scale, None, inputs)
        best, best_error = np.where(error < best_error, scale, best), np.minimum(error, best_error)
    return best


def _squared_error(
    blocks: Floats,
    scheme: WeightScheme,
    scale: Floats,
    zero_point: Floats | None,
    inputs: Floats | None,
) -> Floats:
    """[G, O], of the weights, or of the outputs that inputs [G, R, block] give."""
    codes = FORMATS[scheme.format].nearest(_scaled(blocks, scale, zero_point))
    if zero_point is not None:
        codes -= zero_point[:, None, :]
    codes *= scale[:, None, :]
    codes -= blocks
    if inputs is not None:
        codes = inputs @ codes
    error: Floats = np.square(codes, out=codes).sum(axis=1)
    return error


def _scaled(blocks: Floats, scale: Floats, zero_point: Floats | None) -> Floats:
    """Blocks in units of their scales, from their zero points; 0 where a product of scales has become 0."""
    divisor: Floats = np.where(scale > 0, scale, np.float32(np.inf))
    scaled: Floats = blocks / divisor[:, None, :]
    if zero_point is not None:
        np.rint(scaled, out=scaled)
        scaled += zero_point[:, None, :]
    return scaled


def _power_of_two(largest: Floats, form: NumberFormat, dtype: np.dtype[np.generic]) -> Floats:
    """2 ** (floor(log2(largest)) - floor(log2(format maximum))), the shared exponent of the OCP MX formats."""
    exponent = np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - np.floor(np.log2(form.maximum))
    lowest, highest = _exponents(dtype)
    scale: Floats = np.exp2(np.where(largest > 0, np.clip(exponent, lowest, highest), 0.0)).astype(np.float32)
    return scale


def _input_blocks(inputs: Floats, size: int) -> Floats:
    """[R, I] as [G, r, size] with r <= size, whose products with a block have the norms that the inputs' own have."""
    blocks = _blocks(np.ascontiguousarray(inputs.T), size).transpose(0, 2, 1)
    return blocks if blocks.shape[1] <= size else np.linalg.qr(blocks).R


def _blocks(weight: Floats, block_size: int | None) -> Floats:
    """[I, O] as [G, block, O]; a short last block is filled up with zeros, which every format holds exactly."""
    rows, columns = weight.shape
    size = rows if block_size is None else block_size
    if short := -rows % size:
        weight = np.concatenate([weight, np.zeros((short, columns), np.float32)])
    return weight.reshape(-1, size, columns)
