"""The world half of the application: world driver -> text encoder, gang and VAE of each world model, and the cache."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from ray import serve
from ray.serve import Application
from ray.serve.config import GangSchedulingConfig, RequestRouterConfig

from app.config import Placement, WorldModel, Worlds, Worldstage, WorldStream
from app.worlds.chunk_sharing import ChunkSharing
from app.worlds.model_services import WorldServices
from app.worlds.random_source import checkpoint_folder
from app.worlds.world_card import WorldCard
from app.worlds.world_driver import WorldDriver
from cache_actors.world_cache_actor import WorldCacheClient, get_or_create
from deployments.gang.transport import Backend
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.checkpoint import VAE_FILE, WorldCheckpoint, open_world_checkpoint, world_fingerprints
from deployments.lingbot.session_router import SessionRouter
from deployments.lingbot.stage_session import session_bytes
from deployments.lingbot.stream_config import STREAMS, StreamConfig
from deployments.lingbot.text_replica import WorldTextReplica
from deployments.lingbot.vae_replica import WorldVaeReplica
from deployments.lingbot.world_gang_router import WorldGangRouter
from deployments.lingbot.world_rank import WorldRankSpec
from deployments.lingbot.world_replica import WorldReplica
from deployments.storage import Storage
from deployments.wan.checkpoint import split_blocks
from deployments.wan.memory_plan import DTYPES, GIB

logger = logging.getLogger("ray.serve")


def world_driver(args: Worldstage, drain_s: float, health_period_s: float) -> tuple[Application, list[WorldCard], int]:
    """The driver, the served models and the longest image.  Raises what keeps a model or the cache from working.

    drain_s: for a replica that is told to go.
    """
    worlds = args.worlds
    assert worlds is not None
    services = [_model(model, args, drain_s, health_period_s) for model in worlds.models]
    driver = serve.deployment(
        WorldDriver,
        name="world-driver",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=drain_s,
        health_check_period_s=health_period_s,
    ).bind(services, worlds, args.jobs, _sharing(worlds))
    return driver, [one.card for one in services], worlds.max_image_bytes


def _sharing(worlds: Worlds) -> ChunkSharing | None:
    return None if worlds.cache is None else ChunkSharing(WorldCacheClient(get_or_create(worlds.cache)))


def _model(model: WorldModel, args: Worldstage, drain_s: float, health_period_s: float) -> WorldServices:
    support = None if model.support is None else Path(model.support)
    checkpoint = open_world_checkpoint(checkpoint_folder(model.checkpoint, Path.cwd()), support)
    stream, camera = _stream(model, checkpoint), CameraPolicy(**model.camera.model_dump())
    fingerprints = world_fingerprints(checkpoint)
    common = {"health_check_period_s": health_period_s, "graceful_shutdown_timeout_s": drain_s}
    text = serve.deployment(
        WorldTextReplica,
        name=f"{model.name}-text",
        num_replicas=model.text_encoder.replicas,
        ray_actor_options=_actor_options(model.text_encoder),
        max_ongoing_requests=64,
        **common,
    ).bind(
        checkpoint.support,
        checkpoint.config.text_len,
        DTYPES[model.dtype],
        model.text_encoder.gpus > 0,
        _threads(model.text_encoder, 1),
    )
    vae = serve.deployment(
        WorldVaeReplica,
        name=f"{model.name}-vae",
        num_replicas=model.decoder.replicas,
        ray_actor_options=_actor_options(model.decoder),
        request_router_config=RequestRouterConfig(request_router_class=SessionRouter),
        max_ongoing_requests=256,
        **common,
    ).bind(
        checkpoint.support / VAE_FILE,
        DTYPES[model.decoder.dtype],
        model.decoder.gpus > 0,
        _threads(model.decoder, 1),
        Storage(args.jobs.storage_url),
        model.sessions.decoders,
    )
    topology = model.topology
    gang = serve.deployment(
        WorldReplica,
        name=f"{model.name}-gang",
        num_replicas=topology.pp * topology.gangs,
        ray_actor_options=_actor_options(model.ranks),
        gang_scheduling_config=GangSchedulingConfig(gang_size=topology.pp),
        request_router_config=RequestRouterConfig(request_router_class=WorldGangRouter),
        # The driver bounds what is in flight; the rest is room for questions about windows.
        max_ongoing_requests=256,
        **common,
    ).bind(_rank_spec(model, checkpoint, stream, camera))
    card = WorldCard(
        name=model.name,
        created=int(time.time()),
        fingerprint=fingerprints["transformer"],
        dtype=model.dtype,
        topology=topology,
        stream=WorldStream(chunk=stream.chunk, window=stream.window, sink=stream.sink),
        fps=model.fps,
        default_pixels=model.default_pixels,
        limits=model.limits,
    )
    return WorldServices(
        card=card,
        fingerprints=fingerprints,
        stream=stream,
        camera=camera,
        vae_dtype=model.decoder.dtype,
        max_prompt_tokens=checkpoint.config.text_len,
        sessions=model.sessions,
        text_encoder=text,
        vae=vae,
        gang=gang,
    )


def _stream(model: WorldModel, checkpoint: WorldCheckpoint) -> StreamConfig:
    release = STREAMS[checkpoint.layout]
    cut = model.stream or WorldStream(chunk=release.chunk, window=release.window, sink=release.sink)
    return StreamConfig(cut.chunk, cut.window, cut.sink, release.sampler, model.fps)


def _rank_spec(
    model: WorldModel, checkpoint: WorldCheckpoint, stream: StreamConfig, camera: CameraPolicy
) -> WorldRankSpec:
    topology, ranks = model.topology, model.ranks
    stages = split_blocks(checkpoint.config.num_layers, topology.pp, topology.split)
    # Whatever the proportions of a world, its tokens are its pixels; one row of patches is the finest cut there is.
    height = 16
    width = model.limits.max_pixels // height // 16 * 16
    window = session_bytes(
        checkpoint.config,
        max(len(blocks) for blocks in stages),
        stream,
        height,
        width,
        DTYPES[model.dtype],
        model.limits.max_chunks,
    )
    logger.info(
        "model %s: a world takes up to %.2f GiB on a rank (%d pixels, %d chunks), %d of them at once",
        model.name,
        window / GIB,
        model.limits.max_pixels,
        model.limits.max_chunks,
        model.sessions.live,
    )
    return WorldRankSpec(
        folder=checkpoint.folder,
        support=checkpoint.support,
        stream=stream,
        camera=camera,
        dtype=model.dtype,
        pp=topology.pp,
        split=topology.split,
        backend=_backend(model),
        data_timeout_s=model.data_timeout_s,
        in_flight=topology.requests_in_flight,
        threads=_threads(ranks, topology.pp),
        on_gpu=ranks.gpus > 0,
        max_worlds=model.sessions.live,
        window_bytes=window,
        kv_bytes=int(model.sessions.kv_gib * GIB),
        usual_size=(height, model.default_pixels // height // 16 * 16),
    )


def _backend(model: WorldModel) -> Backend:
    if model.transport != "auto":
        return model.transport
    if model.ranks.gpus == 0:
        return "gloo"
    return "nccl" if model.ranks.gpus >= 1 else "staged"


def _threads(placement: Placement, processes: int) -> int:
    return placement.threads or max(1, (os.cpu_count() or 1) // processes)


def _actor_options(placement: Placement) -> dict[str, float]:
    return {"num_cpus": placement.cpus, "num_gpus": placement.gpus}
