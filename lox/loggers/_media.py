"""Histograms and pictures as the clients of trackers take them."""

from typing import Any

import numpy as np

from lox._histogram import Histogram
from lox._image import Image


def few_bins(histogram: Histogram, most: int) -> tuple[list[float], list[float]]:
    """Counts and edges without the empty bins at the ends, in no more bins than that."""
    counts, edges = np.asarray(histogram.counts, np.float64), histogram.edges.astype(np.float64)
    filled = np.flatnonzero(counts)
    first, last = (filled[0], filled[-1] + 1) if len(filled) else (0, 1)
    counts, edges = counts[first:last], edges[first : last + 1]
    width = -(-len(counts) // most)  # neighbours that become one
    if width > 1:
        starts = np.arange(0, len(counts), width)
        counts, edges = np.add.reduceat(counts, starts), np.append(edges[starts], edges[-1])
    return counts.tolist(), edges.tolist()


def pillow(image: Image) -> Any:
    """A picture of Pillow's, which clients take; of plain arrays some of them would drop axes of length one."""
    import PIL.Image

    PIL.Image.init()  # of which clients take no care when several threads begin
    return PIL.Image.fromarray(image.pixels[..., 0] if image.pixels.shape[-1] == 1 else image.pixels)
