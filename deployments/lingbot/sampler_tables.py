"""The timesteps and noise levels of a chunk's denoise steps: exact tables, no scheduler.

The upstream schedule is a table of 1000 rows: lin = 0.9990000128746033 .. 0 in equal steps, for a flow shift S
sigma = S lin / (1 + (S - 1) lin), rounded to fp32, and t = 1000 sigma, truncated.  Truncation puts many t into more
than one row, and upstream looks them up in two ways: x0 uses the first row with that t, re-noising the second if any.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplerTable:
    """Timesteps of a chunk, the noisiest first.  The sigmas are fp32 values, given by nine digits."""

    timesteps: tuple[int, ...]
    """What the model is told."""
    sigma_x0: tuple[float, ...]
    """For `x0_from_flow`, one a step."""
    sigma_noise: tuple[float, ...]
    """For `renoise` after each step but the last."""

    def __post_init__(self) -> None:
        steps = len(self.timesteps)
        if steps < 1 or len(self.sigma_x0) != steps or len(self.sigma_noise) != steps - 1:
            raise ValueError(
                f"sampler: got {steps} timesteps, {len(self.sigma_x0)} sigma_x0 and {len(self.sigma_noise)} "
                "sigma_noise, expected as many sigma_x0 as timesteps and one sigma_noise fewer"
            )


V1_FAST = SamplerTable(
    (999, 978, 947, 825),
    (0.999899924, 0.978971004, 0.947908878, 0.825852573),
    (0.978829563, 0.947693050, 0.825192571),
)
V2_14B = SamplerTable(
    (999, 967, 908, 768),
    (0.999899924, 0.967949390, 0.908925474, 0.768993914),
    (0.967783391, 0.908594131, 0.768044174),
)
V2_1_3B = SamplerTable(
    (999, 937, 833, 624),
    (0.999799848, 0.937889516, 0.833610356, 0.624687374),
    (0.937577784, 0.833055377, 0.624687374),
)

CLEAN_TIMESTEP = 0
"""Of the pass that writes a finished chunk's keys and values."""
