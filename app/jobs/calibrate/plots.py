"""The two pictures of a calibration: error per skipped step, and quality against saved time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.jobs.calibrate.candidate_run import CandidateRecord
from app.jobs.calibrate.sweep import Skip, interpolated, sensitivities
from deployments.stage_cache.gates import GATES


def plot_sensitivity(path: Path, skips: Sequence[Skip], chosen: Sequence[int]) -> None:
    """Temporal error when one step alone is reused: each video, their mean, and the steps of the chosen schedule."""
    from matplotlib.figure import Figure  # here: only this stage needs the `test` extra

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.semilogy([s.step for s in skips], [max(s.temporal_error, 1e-6) for s in skips], ".", ms=3, color="0.7")
    mean = sensitivities(skips)
    axes.semilogy(list(mean), [max(error, 1e-6) for error in mean.values()], "-", color="C0", label="mean")
    line = interpolated(mean)
    kept = [step for step in chosen if step in line]
    axes.semilogy(kept, [max(line[step], 1e-6) for step in kept], "o", color="C3", label="reused by the profile")
    axes.set(xlabel="skipped step", ylabel="temporal error", title="One step reused, all others computed")
    axes.legend()
    figure.savefig(path, dpi=110)


def plot_quality(path: Path, records: Sequence[CandidateRecord]) -> None:
    """Every candidate: mean temporal error and mean SSIM against the time it saves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    errors, similarity = figure.subplots(1, 2)
    for index, purpose in enumerate(("additive check", "search", "finalist")):
        own = [record for record in records if record.purpose == purpose]
        saved = [100 * (1 - record.candidate.gates.latency_ratio) for record in own]
        errors.plot(saved, [r.temporal_error for r in own], "o", ms=4, color=f"C{index}", label=purpose)
        similarity.plot(saved, [r.candidate.gates.mean_ssim for r in own], "o", ms=4, color=f"C{index}")
    errors.axhline(GATES.mean_temporal_error_ratio, color="0.5", ls="--")
    similarity.axhline(GATES.mean_ssim, color="0.5", ls="--")
    errors.set(xlabel="time saved, % (estimated)", ylabel="mean temporal error", yscale="log")
    similarity.set(xlabel="time saved, % (estimated)", ylabel="mean SSIM")
    errors.legend()
    figure.savefig(path, dpi=110)
