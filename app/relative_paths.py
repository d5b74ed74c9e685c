"""Relative paths of a config count from the folder in which the application is started, in every process."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from app.config import VideoModel, WorldModel, Worlds, Worldstage
from cache_actors.latent_config import LatentCacheConfig


def anchored(args: Worldstage, folder: Path) -> Worldstage:
    """`args` with every relative path made absolute.  Hub ids and URLs that name no local file stay as they are."""
    jobs = args.jobs.model_copy(
        update={
            "database_url": _database(args.jobs.database_url, folder),
            "storage_url": _storage(args.jobs.storage_url, folder),
        }
    )
    models = tuple(_model(model, folder) for model in args.models)
    worlds, latent_cache = _worlds(args.worlds, folder), _latent_cache(args.latent_cache, folder)
    return args.model_copy(update={"jobs": jobs, "models": models, "worlds": worlds, "latent_cache": latent_cache})


def _model(model: VideoModel, folder: Path) -> VideoModel:
    path = folder / Path(model.checkpoint).expanduser()
    changes: dict[str, object] = {"checkpoint": str(path)} if path.is_dir() else {}
    if model.cache_config is not None:
        profile = folder / Path(model.cache_config.wan_profile).expanduser()
        changes["cache_config"] = model.cache_config.model_copy(update={"wan_profile": str(profile)})
    return model.model_copy(update=changes)


def _worlds(worlds: Worlds | None, folder: Path) -> Worlds | None:
    if worlds is None:
        return None
    changes: dict[str, object] = {"models": tuple(_world_model(model, folder) for model in worlds.models)}
    if worlds.cache is not None:
        root = folder / Path(worlds.cache.root).expanduser()
        changes["cache"] = worlds.cache.model_copy(update={"root": str(root)})
    return worlds.model_copy(update=changes)


def _world_model(model: WorldModel, folder: Path) -> WorldModel:
    changes: dict[str, object] = {}
    if not model.checkpoint.startswith("random:"):
        changes["checkpoint"] = str(folder / Path(model.checkpoint).expanduser())
    if model.support is not None:
        changes["support"] = str(folder / Path(model.support).expanduser())
    return model.model_copy(update=changes)


def _latent_cache(cache: LatentCacheConfig | None, folder: Path) -> LatentCacheConfig | None:
    if cache is None:
        return None
    changes: dict[str, object] = {"root": str(folder / Path(cache.root).expanduser())}
    if cache.approximate is not None:
        level_2 = cache.approximate
        approximate: dict[str, object] = {
            "similarity_map": str(folder / Path(level_2.similarity_map).expanduser()),
        }
        if level_2.embedder.kind == "folder":
            path = folder / Path(level_2.embedder.folder).expanduser()
            if path.is_dir():  # otherwise the name of a package
                approximate["embedder"] = level_2.embedder.model_copy(update={"folder": str(path)})
        changes["approximate"] = level_2.model_copy(update=approximate)
    return cache.model_copy(update=changes)


def _storage(url: str, folder: Path) -> str:
    return url if "://" in url else str(folder / Path(url).expanduser())


def _database(url: str, folder: Path) -> str:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ValueError(f"jobs.database_url: got {url!r}: {error}; expected as in sqlite:///folder/jobs.db") from error
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database.startswith((":", "file:")):
        return url
    return parsed.set(database=str(folder / parsed.database)).render_as_string(hide_password=False)
