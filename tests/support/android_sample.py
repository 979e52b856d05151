"""The class `Preparation` of examples/android/README.md, ported to Python line by line.

Above the lines of a function stand the lines of Kotlin that they port; a test compares these with the README. NumPy
takes the place of the loops over rows and columns.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np

from places import ROOT

README = ROOT / "examples" / "android" / "README.md"
# The class begins in the README with this line.
# | /** Prepares bitmaps of any size as the model's `preprocess` does; `json` is the preprocessing.json of the file. */


# | class Preparation(json: String) {
class Preparation:
    def __init__(self, text: str) -> None:
        # | private val fields = JSONObject(json)
        # | private val target = numbers("image_size").map { it.toInt() } // height, width
        # | private val mean = numbers("mean")
        # | private val std = numbers("std")
        self.fields = json.loads(text)
        self.target = [int(side) for side in self.fields["image_size"]]
        self.mean = self.fields["mean"]
        self.std = self.fields["std"]
        # | private val method = fields.getString("interpolation")
        # | private val reach = mapOf("bilinear" to 1, "bicubic" to 2)[method] ?: error("No resize for $method")
        # | private val antialias = fields.getBoolean("antialias")
        # | private val roundPixels = fields.getBoolean("round_pixels")
        self.method = self.fields["interpolation"]
        self.reach = {"bilinear": 1, "bicubic": 2}[self.method]
        self.antialias = self.fields["antialias"]
        self.round_pixels = self.fields["round_pixels"]
        # | private fun numbers(name: String) =
        # | fields.getJSONArray(name).let { List(it.length()) { i -> it.getDouble(i) } }

    # | /** Red, green and blue of every pixel, row by row. */
    # | fun prepared(bitmap: Bitmap): FloatArray {
    def prepared(self, bitmap: np.ndarray) -> np.ndarray:
        # | val source = listOf(bitmap.height, bitmap.width)
        # | val colours = IntArray(source[0] * source[1])
        # | bitmap.getPixels(colours, 0, source[1], 0, 0, source[1], source[0])
        source = bitmap.shape[:2]
        # | val size = sizeBeforeCut(source)
        # | val (top, left) = List(2) { cut(size[it] - target[it]) }
        # | val removed = List(2) { source[it] - size[it] }
        size = self.size_before_cut(source)
        top, left = (self.cut(size[it] - self.target[it]) for it in range(2))
        removed = [source[it] - size[it] for it in range(2)]
        # | val pixels = if (antialias && roundPixels && removed[0] > max(0, 2 * removed[1])) { // as Pillow 13
        # | val rows = resized(1, source[0], 3 * source[1], size[0], top, target[0]) { colour(colours, it) }
        # | resized(target[0], source[1], 3, size[1], left, target[1]) { rows[it] }
        if self.antialias and self.round_pixels and removed[0] > max(0, 2 * removed[1]):
            rows = self.resized(1, source[0], 3 * source[1], size[0], top, self.target[0], bitmap)
            pixels = self.resized(self.target[0], source[1], 3, size[1], left, self.target[1], rows)
        # | } else {
        # | val columns = resized(source[0], source[1], 3, size[1], left, target[1]) { colour(colours, it) }
        # | resized(1, source[0], 3 * target[1], size[0], top, target[0]) { columns[it] }
        # | }
        else:
            columns = self.resized(source[0], source[1], 3, size[1], left, self.target[1], bitmap)
            pixels = self.resized(1, source[0], 3 * self.target[1], size[0], top, self.target[0], columns)
        # | for (i in pixels.indices) {
        # | val channel = if (mean.size == 1) 0 else i % 3
        # | pixels[i] = ((pixels[i] - 255 * mean[channel]) / (255 * std[channel])).toFloat()
        # | }
        # | return pixels
        # | }
        pixels = pixels.reshape(*self.target, 3)
        return ((pixels - 255 * np.array(self.mean)) / (255 * np.array(self.std))).astype(np.float32)

    # The colour is the last axis of a NumPy array.
    # | private fun colour(colours: IntArray, i: Int): Float { // transparent pixels are put on white
    # | val opacity = colours[i / 3] ushr 24
    # | val value = colours[i / 3] shr (16 - 8 * (i % 3)) and 0xff
    # | return round((value * opacity + 255 * (255 - opacity)) / 255.0).toFloat()
    # | }

    # | /** The size (height, width) to resize to, of which the middle is kept. */
    # | private fun sizeBeforeCut(source: List<Int>): List<Int> {
    def size_before_cut(self, source: tuple[int, ...]) -> list[int]:
        # | val size = target.map { floor(it / fields.getDouble("crop_fraction") + 1e-6).toInt() }
        # | if (fields.getString("resize") != "crop") return size
        size = [math.floor(it / self.fields["crop_fraction"] + 1e-6) for it in self.target]
        if self.fields["resize"] != "crop":
            return size
        # | val ratios = List(2) { size[it].toFloat() / source[it].toFloat() }
        # | val side = if (ratios[1] > ratios[0]) 1 else 0
        # | val isNearest = fields.getString("crop_rounding") == "nearest"
        ratios = [np.float32(size[it]) / np.float32(source[it]) for it in range(2)]
        side = 1 if ratios[1] > ratios[0] else 0
        is_nearest = self.fields["crop_rounding"] == "nearest"
        # | return List(2) {
        # | val whole = source[it] * size[side] / source[side]
        # | max(if (isNearest) round(source[it] * ratios[side]).toInt() else whole, target[it])
        # | }
        # | }
        whole = [source[it] * size[side] // source[side] for it in range(2)]
        scaled = [round(np.float32(source[it]) * ratios[side]) if is_nearest else whole[it] for it in range(2)]
        return [max(scaled[it], self.target[it]) for it in range(2)]

    # | private fun cut(margin: Int) =
    # | if (fields.getString("crop_rounding") == "half_even") round(margin / 2.0).toInt() else margin / 2
    def cut(self, margin: int) -> int:
        return round(margin / 2) if self.fields["crop_rounding"] == "half_even" else margin // 2

    # | /** Resizes one side of an array (outer, old, inner) to `new`, and keeps `kept` places of it from `start` on. */
    # | private inline fun resized(
    # | outer: Int, old: Int, inner: Int, new: Int, start: Int, kept: Int, pixel: (Int) -> Float,
    # | ): FloatArray {
    def resized(
        self, outer: int, old: int, inner: int, new: int, start: int, kept: int, pixels: np.ndarray
    ) -> np.ndarray:
        # | val result = FloatArray(outer * kept * inner)
        # | val scale = old.toDouble() / new
        # | val widening = if (antialias) max(scale, 1.0) else 1.0
        pixels = pixels.reshape(outer, old, inner).astype(np.float64)  # as Kotlin computes
        result = np.zeros((outer, kept, inner), np.float32)
        scale = old / new
        widening = max(scale, 1.0) if self.antialias else 1.0
        # | for (place in 0 until kept) {
        # | val centre = (start + place + 0.5) * scale
        # | val first = max((centre - reach * widening + 0.5).toInt(), 0)
        # | val last = min((centre + reach * widening + 0.5).toInt(), old)
        for place in range(kept):
            centre = (start + place + 0.5) * scale
            first = max(int(centre - self.reach * widening + 0.5), 0)
            last = min(int(centre + self.reach * widening + 0.5), old)
            # | val weights = DoubleArray(last - first) { kernel((first + it + 0.5 - centre) / widening) }
            # | val sum = weights.sum()
            # | for (i in weights.indices) weights[i] = floor(weights[i] / sum * ONE + 0.5) / ONE
            weights = [self.kernel((first + it + 0.5 - centre) / widening) for it in range(last - first)]
            total_weight = sum(weights)
            weights = [math.floor(weight / total_weight * ONE + 0.5) / ONE for weight in weights]
            # | for (row in 0 until outer) for (column in 0 until inner) {
            # | var total = 0.0
            # | for (i in weights.indices) total += weights[i] * pixel((row * old + first + i) * inner + column)
            total = np.zeros((outer, inner))
            for i, weight in enumerate(weights):
                total += weight * pixels[:, first + i]
            # | val value = if (roundPixels) floor(total + 0.5) else total
            # | result[(row * kept + place) * inner + column] = value.coerceIn(0.0, 255.0).toFloat()
            # | }
            # | }
            # | return result
            # | }
            value = np.floor(total + 0.5) if self.round_pixels else total
            result[:, place] = value.clip(0, 255)
        return result

    # | private fun kernel(distance: Double): Double {
    # | val x = abs(distance)
    # | return when {
    # | method == "bilinear" -> max(1 - x, 0.0)
    # | x < 1 -> (1.5 * x - 2.5) * x * x + 1
    # | x < 2 -> ((2.5 - 0.5 * x) * x - 4) * x + 2
    # | else -> 0.0
    # | }
    # | }
    def kernel(self, distance: float) -> float:
        x = abs(distance)
        if self.method == "bilinear":
            return max(1 - x, 0.0)
        if x < 1:
            return (1.5 * x - 2.5) * x * x + 1
        return ((2.5 - 0.5 * x) * x - 4) * x + 2 if x < 2 else 0.0


# | private companion object { const val ONE = 4194304.0 } // Pillow's weights are whole numbers of this fraction
# | }
ONE = 4194304.0


def ported_lines() -> list[str]:
    """Return the lines of Kotlin that stand in this file."""
    return re.findall(r"^ *# \| (.*)$", Path(__file__).read_text("utf-8"), re.MULTILINE)


def kotlin() -> str:
    """Return the class in the README."""
    blocks = re.findall(r"^```kotlin\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "class Preparation(" in block]
    return block
