"""The published TeaCache polynomials of Wan2.1, for comparison runs.

They were fitted to whole models and to one signal each: a set is valid for its own signal only, and none is a qualified
default of a stage.  Source: ali-vilab/TeaCache, TeaCache4Wan2.1/teacache_generate.py.
"""

from __future__ import annotations

from typing import Literal

Signal = Literal["e", "e0"]
"""``e``: output of the time embedding [dim]; ``e0``: its six-fold projection [6 * dim] (`--use_ret_steps`)."""

Coefficients = tuple[float, float, float, float, float]
"""Degree-4 polynomial, highest power first."""

PublishedModel = Literal["t2v-1.3b", "t2v-14b", "i2v-480p", "i2v-720p"]

PUBLISHED: dict[tuple[PublishedModel, Signal], Coefficients] = {
    ("t2v-1.3b", "e"): (2.39676752e03, -1.31110545e03, 2.01331979e02, -8.29855975, 0.137887774),
    ("t2v-1.3b", "e0"): (-5.21862437e04, 9.23041404e03, -5.28275948e02, 13.6987616, -0.0499875664),
    ("t2v-14b", "e"): (-5784.54975374, 5449.50911966, -1811.16591783, 256.27178429, -13.02252404),
    ("t2v-14b", "e0"): (-3.03318725e05, 4.90537029e04, -2.65530556e03, 58.7365115, -0.315583525),
    ("i2v-480p", "e"): (-302.331670, 223.948934, -52.5463970, 5.87348440, -0.201973289),
    ("i2v-480p", "e0"): (2.57151496e05, -3.54229917e04, 1.40286849e03, -13.5890334, 0.132517977),
    ("i2v-720p", "e"): (-114.36346466, 65.26524496, -18.82220707, 4.91518089, -0.23412683),
    ("i2v-720p", "e0"): (8.10705460e03, 2.13393892e03, -372.934672, 16.6203073, -0.0417769401),
}
