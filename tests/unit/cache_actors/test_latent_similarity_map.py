"""Tiers rise, name steps that leave enough to compute, and a score below them all skips nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from cache_actors.latent_config import Floors, LatentCacheConfig
from cache_actors.similarity_map import JudgedPairs, MapError, SimilarityMap, load_map, unmet_floor
from tests.latents import identity, similarity_map, tier


def test_skipped_steps_never_rise_when_the_score_falls() -> None:
    served = similarity_map(tier(0.6, 3), tier(0.8, 5), tier(0.95, 8))
    deepest = [
        max((t.skip_steps for t in served.tiers_for(score)), default=0) for score in (0, 0.59, 0.6, 0.79, 0.8, 0.95, 1)
    ]
    assert deepest == [0, 0, 3, 3, 5, 8, 8]
    assert [t.skip_steps for t in served.tiers_for(0.99)] == [8, 5, 3]


@pytest.mark.parametrize("tiers", [(tier(0.9, 3), tier(0.6, 6)), (tier(0.6, 6), tier(0.9, 6)), (tier(0.6, 9),), ()])
def test_tiers_that_fall_or_skip_too_much_are_refused(tiers: tuple) -> None:
    fields = similarity_map().model_dump() | {"tiers": [t.model_dump() for t in tiers]}
    with pytest.raises(ValidationError, match="tiers"):
        SimilarityMap.model_validate(fields)


def test_a_map_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(similarity_map().model_dump_json())
    assert load_map(path) == similarity_map()
    path.write_text('{"format": 1}')
    with pytest.raises(MapError, match="calibrate_latent_cache"):
        load_map(path)
    with pytest.raises(MapError, match="cannot be read"):
        load_map(tmp_path / "absent")


def test_floors() -> None:
    assert unmet_floor(Floors(), tier(0.6, 3).evidence) is None
    assert "23 pairs" in (unmet_floor(Floors(), tier(0.6, 3, pairs=23).evidence) or "")
    # The bound counts, not the mean: 0.923 - 0.005 is below 0.92.
    assert "SSIM" in (unmet_floor(Floors(), tier(0.6, 3, ssim=0.923).evidence) or "")
    assert "PSNR" in (unmet_floor(Floors(psnr_mean_db=36), tier(0.6, 3).evidence) or "")


def test_scope_and_rates() -> None:
    scope = similarity_map().scope
    assert scope.differs(identity()) == []
    assert scope.differs(identity(width=64, flow_shift=5.0)) == ["width", "flow_shift"]
    pairs = JudgedPairs(same=10, different=20, accepted_same=6, accepted_different=2)
    assert (pairs.precision, pairs.recall) == (0.75, 0.6)


def test_a_block_without_a_level_is_refused() -> None:
    with pytest.raises(ValidationError, match="no level is on"):
        LatentCacheConfig(exact_results=False, exact_states=False)
    with pytest.raises(ValidationError, match="extra"):
        LatentCacheConfig.model_validate({"modus": "read_write"})
