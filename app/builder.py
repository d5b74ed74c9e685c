"""From configuration to a Serve application: everything is checked first, then the deployments are bound.

No `from __future__ import annotations` here: Serve reads the annotation of `build` to validate the config file's
`args`, and a string would make it hand over an unchecked dict.
"""

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import GangSchedulingConfig, RequestRouterConfig

from app.config import Placement, VideoModel, Worldstage
from app.driver.video_attempt import ModelServices
from app.driver.video_driver import VideoDriver
from app.ingress import VideoIngress
from app.model_card import ModelCard
from app.planning.step_cache_policy import StepCachePolicy, open_policy
from app.relative_paths import anchored
from cache_actors.latent_config import LatentCacheConfig
from deployments.gang.router import GangRouter
from deployments.gang.stage_replica import StageReplica
from deployments.gang.transport import Backend
from deployments.storage import Storage
from deployments.wan.checkpoint import WanCheckpoint, fingerprint, open_checkpoint
from deployments.wan.decoder import DecoderReplica
from deployments.wan.free_memory import free_host_memory
from deployments.wan.memory_plan import DTYPES, GIB, HOST, MemoryPlan, plan_memory
from deployments.wan.text_encoder import TextEncoderReplica
from deployments.wan.video_rank import StageCaching, VideoRankSpec

if TYPE_CHECKING:
    from app.planning.latent_policy import LatentPolicy
    from app.worlds.world_card import WorldCard

DRAIN_S = 30.0
"""A replica that is told to go finishes what takes no longer; jobs survive all the same."""
HEALTH_PERIOD_S = 2.0

logger = logging.getLogger("ray.serve")


def build(args: Worldstage) -> Application:
    """The application: ingress -> driver -> text encoder, gang and decoder of each model."""
    if not isinstance(args, Worldstage):
        raise TypeError(f"args: got {type(args).__name__}, expected Worldstage; Serve did not validate the config file")
    args = anchored(args, Path.cwd())
    services = [_model(model, args) for model in args.models]
    if args.latent_cache is not None:
        _start_latent_cache(args.latent_cache)
    worlds = _world_driver(args) if args.worlds is not None else None
    driver = serve.deployment(
        VideoDriver,
        name="driver",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=DRAIN_S,
        health_check_period_s=HEALTH_PERIOD_S,
    ).bind(services, args.jobs)
    ingress = serve.deployment(
        serve.ingress()(VideoIngress),
        name="ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=10_000,
        health_check_period_s=HEALTH_PERIOD_S,
    )
    cached = args.latent_cache is not None
    storage = Storage(args.jobs.storage_url)
    return ingress.bind(driver, [s.card for s in services], storage, args.http, cached, worlds=worlds)


def _model(model: VideoModel, args: Worldstage) -> ModelServices:
    checkpoint = open_checkpoint(model.checkpoint, model.revision)
    memory = plan_memory(checkpoint, model)
    # A GPU's free memory is known only in the process that gets it: ranks and services check theirs before they load.
    available = {HOST: free_host_memory()} if any(need.pool == HOST for need in memory.needs) else {}
    logger.info("model %s\n%s", model.name, memory.format(available))
    memory.refuse_if_too_big(available)
    card = _card(model, checkpoint)
    caching = model.cache_config
    policy = open_policy(caching, model, checkpoint, card.fingerprint) if caching else None
    return ModelServices(
        card=card,
        scheduler=checkpoint.scheduler,
        scheduler_config=checkpoint.scheduler_config,
        boundary_ratio=checkpoint.boundary_ratio,
        latent_channels=checkpoint.vae_config["z_dim"],
        vae_stride=(checkpoint.vae_config["scale_factor_temporal"], checkpoint.vae_config["scale_factor_spatial"]),
        text_encoder=_text_encoder(model, checkpoint, memory),
        gang=_gang(model, memory, policy, args),
        decoder=_decoder(model, checkpoint, memory, args),
        step_cache=policy,
        latent_cache=_latent_policy(args.latent_cache, model, checkpoint, card.fingerprint, policy),
    )


def _latent_policy(
    config: LatentCacheConfig | None,
    model: VideoModel,
    checkpoint: WanCheckpoint,
    fingerprint: str,
    step_cache: StepCachePolicy | None,
) -> "LatentPolicy | None":
    if config is None:
        return None
    # Here, as in `_start_latent_cache`: a server without the latent cache imports nothing of it.
    from app.planning.latent_policy import open_latent_policy

    return open_latent_policy(
        config,
        model,
        checkpoint,
        fingerprint,
        step_profile=step_cache.profile.digest if step_cache else None,
        threads=_threads(model.ranks, model.topology.ranks),
        accelerators=[name for name in ray.cluster_resources() if name.startswith("accelerator_type:")],
    )


def _start_latent_cache(config: LatentCacheConfig) -> None:
    """Raises RuntimeError with the reason when it cannot work: the start stops here."""
    from cache_actors.latent_cache_actor import get_or_create

    get_or_create(config)


def _card(model: VideoModel, checkpoint: WanCheckpoint) -> ModelCard:
    shift = model.defaults.flow_shift
    return ModelCard(
        name=model.name,
        created=int(time.time()),
        fingerprint=fingerprint(checkpoint),
        experts=len(checkpoint.experts),
        dtype=model.dtype,
        topology=model.topology,
        defaults=model.defaults,
        flow_shift=checkpoint.flow_shift if shift is None else shift,
        limits=model.limits,
    )


def _gang(model: VideoModel, memory: MemoryPlan, policy: StepCachePolicy | None, args: Worldstage) -> Application:
    topology, ranks = model.topology, model.ranks
    spec = VideoRankSpec(
        checkpoint=model.checkpoint,
        revision=model.revision,
        dtype=model.dtype,
        compile_blocks=model.compile == "blocks",
        pp=topology.pp,
        cfg=topology.cfg,
        split=topology.split,
        backend=_backend(model),
        data_timeout_s=model.data_timeout_s,
        in_flight=topology.requests_in_flight,
        threads=_threads(ranks, topology.ranks),
        on_gpu=_on_gpu(ranks),
        memory=memory,
        step_cache=_caching(model, policy),
        storage_url=args.jobs.storage_url,
    )
    return serve.deployment(
        StageReplica,
        name=f"{model.name}-gang",
        num_replicas=topology.ranks * topology.gangs,
        ray_actor_options=_actor_options(ranks),
        gang_scheduling_config=GangSchedulingConfig(gang_size=topology.ranks),
        request_router_config=RequestRouterConfig(request_router_class=GangRouter),
        # The driver bounds what is in flight; the rest is room for warm-ups and for callers that take over.
        max_ongoing_requests=4 * topology.requests_in_flight,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=DRAIN_S,
    ).bind(spec)


def _caching(model: VideoModel, policy: StepCachePolicy | None) -> StageCaching | None:
    if policy is None or model.cache_config is None:
        return None
    return StageCaching(policy.profile, int(model.cache_config.budget_gib * GIB))


def _backend(model: VideoModel) -> Backend:
    if model.transport != "auto":
        return model.transport
    if not _on_gpu(model.ranks):
        return "gloo"
    return "nccl" if model.ranks.gpus >= 1 else "staged"


def _text_encoder(model: VideoModel, checkpoint: WanCheckpoint, memory: MemoryPlan) -> Application:
    service = model.text_encoder
    return serve.deployment(
        TextEncoderReplica,
        name=f"{model.name}-text",
        num_replicas=service.replicas,
        ray_actor_options=_actor_options(service),
        max_ongoing_requests=64,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=DRAIN_S,
    ).bind(checkpoint.folder, DTYPES[model.dtype], _on_gpu(service), _threads(service, 1), memory)


def _decoder(model: VideoModel, checkpoint: WanCheckpoint, memory: MemoryPlan, args: Worldstage) -> Application:
    service = model.decoder
    return serve.deployment(
        DecoderReplica,
        name=f"{model.name}-decoder",
        num_replicas=service.replicas,
        ray_actor_options=_actor_options(service),
        max_ongoing_requests=64,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=DRAIN_S,
    ).bind(
        checkpoint.folder,
        DTYPES[service.dtype],
        _on_gpu(service),
        _threads(service, 1),
        memory,
        Storage(args.jobs.storage_url),
    )


def _world_driver(args: Worldstage) -> "tuple[Application, list[WorldCard], int]":
    # Here: a server without worlds imports nothing of them.
    from app.world_builder import world_driver

    return world_driver(args, DRAIN_S, HEALTH_PERIOD_S)


def _on_gpu(placement: Placement) -> bool:
    return placement.gpus > 0


def _threads(placement: Placement, processes: int) -> int:
    """Ray would leave a process with a fraction of a CPU one thread; the phases of a video hardly overlap."""
    return placement.threads or max(1, (os.cpu_count() or 1) // processes)


def _actor_options(placement: Placement) -> dict[str, float]:
    return {"num_cpus": placement.cpus, "num_gpus": placement.gpus}
