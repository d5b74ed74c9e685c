"""The calibration in words and as a picture: table.md and plot.png beside the map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from app.jobs.calibrate_latent_cache.damage import Damage
from app.jobs.calibrate_latent_cache.judgement import JudgedPair, rates
from cache_actors.latent_config import Floors
from cache_actors.similarity_map import SimilarityMap, unmet_floor


def write_report(
    folder: Path, served: SimilarityMap, judged: Sequence[JudgedPair], damage: Sequence[Damage], floors: Floors
) -> None:
    """folder: exists."""
    (folder / "table.md").write_text(table(served, judged, floors), encoding="utf-8")
    plot(folder / "plot.png", judged, damage)


def table(served: SimilarityMap, judged: Sequence[JudgedPair], floors: Floors) -> str:
    """Markdown: rates by source with and without the guard, tiers with their evidence, what the guard refused."""
    lowest = served.tiers[0].min_score
    lines = [
        f"Lowest score served: {lowest}. Wrong: pairs of different meaning that would be hits.",
        "",
        "| pairs | same | different | precision | recall | wrong | wrong by score alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for source in (*sorted({j.pair.source for j in judged}), "all"):
        part = [j for j in judged if source in ("all", j.pair.source)]
        found = rates(part, lowest)
        alone = sum(not j.pair.same and j.score >= lowest for j in part)
        lines.append(
            f"| {source} | {found.same} | {found.different} | {found.precision:.3f} | {found.recall:.3f} | "
            f"{found.accepted_different} | {alone} |"
        )
    lines += [
        "",
        "| from score | skipped | pairs | SSIM mean (lower bound, min) | PSNR dB | temporal error (max) | served |",
        "|---|---|---|---|---|---|---|",
    ]
    for tier in served.tiers:
        e = tier.evidence
        lines.append(
            f"| {tier.min_score} | {tier.skip_steps} of {served.scope.num_inference_steps} | {e.pairs} | "
            f"{e.ssim_mean:.4f} ({e.ssim_mean_lower:.4f}, {e.ssim_min:.4f}) | {e.psnr_mean_db:.2f} | "
            f"{e.temporal_error_mean:.3f} ({e.temporal_error_max:.3f}) | {unmet_floor(floors, e) or 'yes'} |"
        )
    refused = Counter(j.veto.split(":")[0] for j in judged if j.veto is not None and j.pair.same)
    lines += [
        "",
        "Equal meanings that the guard refused, by kind: " + (str(dict(refused)) if refused else "none") + ".",
    ]
    return "\n".join(lines) + "\n"


def plot(path: Path, judged: Sequence[JudgedPair], damage: Sequence[Damage]) -> None:
    """Left: scores of pairs by meaning and verdict.  Right: SSIM over score for each step.  Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    groups = {
        "same, passes": [j.score for j in judged if j.pair.same and j.veto is None],
        "same, refused by the guard": [j.score for j in judged if j.pair.same and j.veto is not None],
        "different, refused by the guard": [j.score for j in judged if not j.pair.same and j.veto is not None],
        "different, passes": [j.score for j in judged if not j.pair.same and j.veto is None],
    }
    left.hist(list(groups.values()), bins=30, stacked=True, label=list(groups))
    left.set(xlabel="cosine of the two prompts", ylabel="pairs")
    left.legend(fontsize=7)
    for step in sorted({d.skip_steps for d in damage}):
        at = [d for d in damage if d.skip_steps == step]
        right.scatter([d.score for d in at], [d.ssim for d in at], s=10, label=f"{step} steps skipped")
    right.set(xlabel="cosine of the two prompts", ylabel="SSIM to the cold run")
    if damage:
        right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
