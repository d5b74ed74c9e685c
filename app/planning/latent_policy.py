"""What the driver must know to ask the latent cache about one model's requests; made where the application is built."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from app.config import VideoModel
from app.driver.job_state import VideoParams
from cache_actors.latent_config import LatentCacheConfig
from cache_actors.latent_key import LatentIdentity, ServedModel, canonical_sha256
from cache_actors.similarity_map import SimilarityMap, load_map
from deployments.video_file import ENCODING
from deployments.wan.checkpoint import WanCheckpoint
from deployments.wan.prompt_cleaning import prompt_clean
from deployments.wan.solver_spec import SolverSpec


@dataclass(frozen=True)
class LatentPolicy:
    """Made by `open_latent_policy`; picklable, so that the driver can hold it."""

    config: LatentCacheConfig
    served: ServedModel
    similarity_map: SimilarityMap | None
    """None with level 2 off."""

    def identity(
        self,
        params: VideoParams,
        solver: SolverSpec,
        latent_shape: tuple[int, ...],
        reused_steps: tuple[int, ...],
    ) -> LatentIdentity:
        """Source of a request's keys.  reused_steps: of its plan from the first step on."""
        scheduler = solver.build("cpu")
        return LatentIdentity.of(
            params.model_dump(exclude={"tenant"}),
            self.served,
            tenant=params.tenant,
            latent_shape=latent_shape,
            timesteps=tuple(map(float, scheduler.timesteps.tolist())),
            sigmas=tuple(map(float, scheduler.sigmas.tolist())),
            reused_steps=reused_steps,
            clean=prompt_clean,
        )

    def donor_steps(self, identity: LatentIdentity) -> tuple[int, ...]:
        """Steps whose entering latents a request should leave for others; none where nobody could use them."""
        level_2, served = self.config.approximate, self.similarity_map
        if level_2 is None or served is None or self.config.mode == "read_only":
            return ()
        if served.scope.differs(identity) and not level_2.experimental:
            return ()
        return served.steps


def open_latent_policy(
    config: LatentCacheConfig,
    model: VideoModel,
    checkpoint: WanCheckpoint,
    fingerprint: str,
    step_profile: str | None,
    threads: int,
    accelerators: Sequence[str],
) -> LatentPolicy:
    """step_profile: digest of the step cache's profile.  threads: of a rank.  accelerators: GPU types of the cluster.

    Raises MapError; ValueError where bit-equality of level 1 cannot be promised.
    """
    on_gpu = model.ranks.gpus > 0
    if on_gpu and len(accelerators) > 1 and config.exact_states:
        raise ValueError(
            f"latent_cache.exact_states: true, but the cluster has GPUs of several types {sorted(accelerators)}, and "
            "the bits of a trajectory depend on the type; set it to false"
        )
    level_2 = config.approximate
    if level_2 is not None and level_2.shadow_fraction > 0 and find_spec("skimage") is None:
        raise ValueError(
            f"latent_cache.approximate.shadow_fraction: got {level_2.shadow_fraction}, but comparing needs "
            "scikit-image; run `pip install 'worldstage[semantic]'`, or leave it at 0"
        )
    topology = model.topology
    numerics = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "diffusers": version("diffusers"),
        "device": list(accelerators) if on_gpu else [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "threads": threads,
        "compile": model.compile,
        "topology": [topology.pp, topology.cfg, list(topology.split or ())],
        "transport": model.transport,
    }
    served = ServedModel(
        weights=fingerprint,
        task="t2v",
        scheduler=checkpoint.scheduler,
        scheduler_config=canonical_sha256("scheduler_config", checkpoint.scheduler_config),
        boundary_ratio=checkpoint.boundary_ratio,
        loras=(),
        dtype=model.dtype,
        quantization=None,
        latent_dtype="float32",
        step_profile=step_profile,
        decoder=canonical_sha256("decoder", {"dtype": model.decoder.dtype, "encoding": ENCODING}),
        numerics=canonical_sha256("numerics", numerics),
    )
    return LatentPolicy(config, served, None if level_2 is None else load_map(Path(level_2.similarity_map)))
