"""The tables against the closed form of the upstream schedule."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.lingbot.sampler_tables import V1_FAST, V2_1_3B, V2_14B, SamplerTable


def upstream_rows(shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Sigma (fp32) and t (int64) of the 1000 rows."""
    lin = np.linspace(float(np.float32(0.999)), 0, 1001)[:-1]
    sigma = (shift * lin / (1 + (shift - 1) * lin)).astype(np.float32)
    return sigma, (1000 * sigma).astype(np.int64)


# Row indices: those of the releases' timestep lists.
@pytest.mark.parametrize(
    ("table", "shift", "indices"),
    [
        (V1_FAST, 10, (0, 179, 358, 679)),
        (V2_14B, 10, (0, 250, 500, 750)),
        (V2_1_3B, 5, (0, 250, 500, 750)),
    ],
)
def test_tables_equal_the_closed_form(table: SamplerTable, shift: float, indices: tuple[int, ...]) -> None:
    sigma, t = upstream_rows(shift)
    timesteps = [int(t[i]) for i in indices]
    assert table.timesteps == tuple(timesteps)
    rows = [np.flatnonzero(t == step) for step in timesteps]
    assert [np.float32(s) for s in table.sigma_x0] == [sigma[r[0]] for r in rows]
    assert [np.float32(s) for s in table.sigma_noise] == [sigma[r[1] if len(r) > 1 else r[0]] for r in rows[1:]]


@pytest.mark.parametrize(("shift", "duplicates"), [(10, 520), (5, 382)])
def test_closed_form_is_the_upstream_table(shift: float, duplicates: int) -> None:
    """The number of rows that repeat a t is known from the upstream table."""
    _, t = upstream_rows(shift)
    assert len(t) - len(set(t.tolist())) == duplicates


def test_a_table_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sampler: got 2 timesteps, 2 sigma_x0 and 2 sigma_noise"):
        SamplerTable((999, 500), (1.0, 0.5), (0.5, 0.1))
