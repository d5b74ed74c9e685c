"""The Serve application's arguments: one closed, frozen model at every level, so that a misspelt key stops the start.

`builder.build` receives a `Worldstage`; nothing else reads configuration, and the environment is never consulted.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cache_actors.latent_config import LatentCacheConfig
from cache_actors.world_config import WorldCacheConfig


class Closed(BaseModel):
    """Base of every configuration model: unknown fields are errors, values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Topology(Closed):
    """How one model is spread over ranks.  A gang has ``pp * cfg`` ranks; rank = branch * pp + stage."""

    pp: int = Field(1, ge=1, le=4, description="Pipeline stages of one guidance branch.")
    cfg: Literal[1, 2] = Field(1, description="1: both guidance branches on one chain; 2: a chain for each branch.")
    split: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="Blocks of each stage, first to last; None splits as evenly as possible."
    )
    gangs: int = Field(1, ge=1, description="Independent copies of the whole pipeline.")
    requests_in_flight: int = Field(
        2, ge=1, le=64, description="Requests one gang interleaves; pp of them (pp/2 with cfg 1) fill the pipeline."
    )

    @model_validator(mode="after")
    def _split_names_every_stage(self) -> Topology:
        if self.split is not None and len(self.split) != self.pp:
            raise ValueError(f"split: got {len(self.split)} stages {list(self.split)}, expected pp = {self.pp} of them")
        return self

    @property
    def ranks(self) -> int:
        """Ranks of one gang."""
        return self.pp * self.cfg


class Placement(Closed):
    """Where the processes of one role run.  All values are for one process."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where the process is given a GPU.")
    cpus: float = Field(0.1, ge=0, description="CPUs Ray reserves.")
    gpus: float = Field(0, ge=0, description="GPUs Ray reserves; below 1, processes share a card.")
    threads: int | None = Field(
        None,
        ge=1,
        description="Torch threads on a CPU; None: the machine's cores, shared evenly by the ranks of a gang.",
    )

    @model_validator(mode="after")
    def _cuda_needs_a_gpu(self) -> Placement:
        if self.device == "cuda" and self.gpus == 0:
            raise ValueError("device: got 'cuda' with gpus = 0; set gpus above 0 or device to 'auto' or 'cpu'")
        if self.device == "cpu" and self.gpus > 0:
            raise ValueError(f"gpus: got {self.gpus} with device 'cpu'; set gpus to 0 or device to 'auto' or 'cuda'")
        return self


class Service(Placement):
    """A deployment beside the gang."""

    replicas: int = Field(1, ge=1)


class Decoder(Service):
    """The VAE decoder."""

    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of the VAE; bfloat16 shows in dark areas.")


class VideoDefaults(Closed):
    """What a request gets for the fields it does not send; shown in full in every job."""

    width: int = Field(832, ge=16, multiple_of=16, description="Pixels.")
    height: int = Field(480, ge=16, multiple_of=16, description="Pixels.")
    num_frames: int = Field(81, ge=1, description="4k + 1: the VAE's first latent frame holds one frame, later ones 4.")
    fps: int = Field(16, ge=1, le=120, description="Frames a second of the file; it does not change the frames.")
    num_inference_steps: int = Field(50, ge=1)
    guidance_scale: float = Field(5.0, ge=0, le=100, description="1 or less runs the positive branch alone.")
    guidance_scale_2: float | None = Field(
        None, ge=0, le=100, description="Guidance of the low-noise expert; None: guidance_scale."
    )
    flow_shift: float | None = Field(None, gt=0, le=100, description="None: the checkpoint's scheduler_config.json.")
    negative_prompt: str = ""
    max_sequence_length: int = Field(512, ge=1, description="Text tokens; shorter prompts are padded with zeros.")

    @model_validator(mode="after")
    def _frames_fit_the_vae(self) -> VideoDefaults:
        if self.num_frames % 4 != 1:
            below = max(1, (self.num_frames - 1) // 4 * 4 + 1)
            raise ValueError(f"num_frames: got {self.num_frames}, expected 4k + 1; nearest {below} and {below + 4}")
        return self


class VideoLimits(Closed):
    """Upper bounds of one request; above them the answer is 400 with the bound."""

    max_pixels: int = Field(1280 * 720, ge=256, description="width * height.")
    max_frames: int = Field(121, ge=1)
    max_steps: int = Field(100, ge=1, le=1000)
    max_prompt_chars: int = Field(4000, ge=1)
    max_sequence_length: int = Field(512, ge=1)


class CacheConfig(Closed):
    """Reuse inside one request: the step cache."""

    wan_profile: str = Field(description="Folder of a profile: which steps reuse, and how their residual is predicted.")
    allow_unqualified: bool = Field(False, description="Serve a profile that has not passed acceptance; jobs say so.")
    budget_gib: float = Field(4.0, ge=0, description="Residuals one rank may hold; requests beyond it run native.")


class VideoModel(Closed):
    """One served text-to-video model."""

    kind: Literal["video"] = "video"
    name: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$", description="The `model` of a request.")
    checkpoint: str = Field(description="Diffusers-layout folder, or a hub id together with `revision`.")
    revision: str | None = Field(None, description="Commit of a hub id; a branch name would not pin the weights.")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    compile: Literal["none", "blocks"] = Field("none", description="blocks: torch.compile of each block on its own.")
    topology: Topology = Topology()
    ranks: Placement = Placement()
    text_encoder: Service = Service()
    decoder: Decoder = Decoder()
    transport: Literal["auto", "nccl", "gloo", "staged"] = Field(
        "auto", description="auto: gloo on CPUs, nccl with a GPU a rank, staged (through host memory) on a shared GPU."
    )
    cache_config: CacheConfig | None = Field(None, description="None: every step of every request is computed.")
    data_timeout_s: float = Field(120, gt=0, description="Longest wait for a peer's tensor before the gang restarts.")
    defaults: VideoDefaults = VideoDefaults()
    limits: VideoLimits = VideoLimits()


class Jobs(Closed):
    """The durable job table and where results go."""

    database_url: str = Field("sqlite:///worldstage-data/jobs.db", description="Any SQLAlchemy URL.")
    storage_url: str = Field("worldstage-data/results", description="fsspec URL or folder that every node can reach.")
    max_queued: int = Field(64, ge=1, description="Jobs waiting for a model; more are refused with 429.")
    max_attempts: int = Field(
        3, ge=1, description="Workers a job may lose in a row without getting any further; then it fails."
    )
    checkpoint_every_steps: int = Field(10, ge=0, description="Steps between saved solver states; 0 saves none.")


class Http(Closed):
    """Bounds of the HTTP surface."""

    max_body_bytes: int = Field(1 << 20, ge=1024)


class WorldStream(Closed):
    """How a world is cut into chunks, in latent frames; the sampler is the release's own."""

    chunk: int = Field(ge=1, description="Latent frames of a chunk.")
    window: int = Field(ge=-1, description="Frames a chunk attends to, itself and the sink included; -1: all.")
    sink: int = Field(0, ge=0, description="First frames, which stay in the window for ever.")

    @model_validator(mode="after")
    def _a_chunk_fits(self) -> WorldStream:
        if self.window == -1 and self.sink:
            raise ValueError(f"sink: got {self.sink} with window -1, expected 0: nothing is ever dropped")
        if self.window != -1 and self.window < self.sink + self.chunk:
            least = self.sink + self.chunk
            raise ValueError(f"window: got {self.window}, expected -1 or at least sink + chunk = {least}")
        return self


class WorldCamera(Closed):
    """How keys move the camera; part of every world's key."""

    move_step: float = Field(0.05, gt=0, description="World units a video frame.")
    turn_step: float = Field(2.0, gt=0, le=45, description="Degrees a video frame.")
    pitch_limit: float = Field(85.0, gt=0, lt=90, description="Degrees.")
    translation_scale: float = Field(3.0, gt=0, description="Length that a chunk's largest step is given.")
    intrinsics: tuple[float, float, float, float] = Field(
        (416.0, 416.0, 416.0, 240.0), description="fx, fy, cx, cy in pixels of a 480x832 frame."
    )


class WorldTopology(Closed):
    """How a world model is spread over ranks; a gang has ``pp`` of them."""

    pp: int = Field(1, ge=1, le=4, description="Pipeline stages.")
    split: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="Blocks of each stage, first to last; None splits as evenly as possible."
    )
    gangs: int = Field(1, ge=1, description="Independent copies of the pipeline.")
    requests_in_flight: int = Field(2, ge=1, le=64, description="Chunks of different worlds one gang interleaves.")

    @model_validator(mode="after")
    def _split_names_every_stage(self) -> WorldTopology:
        if self.split is not None and len(self.split) != self.pp:
            raise ValueError(f"split: got {len(self.split)} stages {list(self.split)}, expected pp = {self.pp} of them")
        return self


class WorldLimits(Closed):
    """Upper bounds of one world; above them the answer is 4xx with the bound."""

    max_pixels: int = Field(832 * 480, ge=256, description="width * height.")
    max_chunks: int = Field(256, ge=1, description="Chunks of one world; with window -1 memory grows with them.")
    max_request_chunks: int = Field(16, ge=1, description="Chunks that one request may ask for.")
    max_prompt_chars: int = Field(4000, ge=1)
    max_image_pixels: int = Field(4096 * 4096, ge=256, description="width * height of the image that is sent.")


class WorldSessions(Closed):
    """What a gang keeps of worlds between their chunks; all of it can be lost and rebuilt."""

    live: int = Field(4, ge=1, description="Windows on each rank; the least recently used world is parked beyond them.")
    kv_gib: float = Field(2.0, ge=0, description="Host memory for keys and values of finished chunks, a gang's total.")
    decoders: int = Field(4, ge=1, description="Worlds whose decoder state each decoder replica keeps.")
    park_after_s: float = Field(
        300.0, gt=0, description="Unused for so long a world is parked: only its journal stays."
    )


class WorldModel(Closed):
    """One served world model."""

    kind: Literal["world"] = "world"
    name: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$", description="The `model` of a request.")
    checkpoint: str = Field(
        description="Folder of a release, or random:small for random weights in the real layout, made at the start."
    )
    support: str | None = Field(None, description="Folder with VAE and text encoder, for a release that has none.")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    stream: WorldStream | None = Field(None, description="None: what the release was made for.")
    camera: WorldCamera = WorldCamera()
    fps: int = Field(16, ge=1, le=120, description="Frames a second of files and streams.")
    topology: WorldTopology = WorldTopology()
    ranks: Placement = Placement()
    text_encoder: Service = Service()
    decoder: Decoder = Decoder()
    transport: Literal["auto", "nccl", "gloo", "staged"] = "auto"
    data_timeout_s: float = Field(120, gt=0, description="Longest wait for a peer's tensor before the gang restarts.")
    default_pixels: int = Field(832 * 464, ge=256, description="Area of a world whose request names no size.")
    limits: WorldLimits = WorldLimits()
    sessions: WorldSessions = WorldSessions()

    @model_validator(mode="after")
    def _every_request_in_flight_has_a_window(self) -> WorldModel:
        if self.sessions.live < self.topology.requests_in_flight:
            raise ValueError(
                f"sessions.live: got {self.sessions.live}, expected at least topology.requests_in_flight = "
                f"{self.topology.requests_in_flight}"
            )
        if self.default_pixels > self.limits.max_pixels:
            raise ValueError(
                f"default_pixels: got {self.default_pixels}, expected at most limits.max_pixels = "
                f"{self.limits.max_pixels}"
            )
        return self


class Worlds(Closed):
    """Interactive worlds."""

    models: tuple[WorldModel, ...] = Field(min_length=1)
    cache: WorldCacheConfig | None = Field(None, description="Chunks shared between worlds; None: nothing is shared.")
    max_worlds: int = Field(1000, ge=1, description="Worlds that are not deleted; more are refused with 429.")
    max_image_bytes: int = Field(16 << 20, ge=1024, description="Of an image file that is sent.")
    max_waiting: int = Field(16, ge=1, description="Requests waiting for a model; more are refused with 429.")
    max_attempts: int = Field(3, ge=1, description="Workers a chunk may lose in a row; then it fails, its world stays.")


class Worldstage(Closed):
    """Arguments of `builder.build`, the `args` of the application in a Serve config file."""

    models: tuple[VideoModel, ...] = ()
    worlds: Worlds | None = Field(None, description="None: no world is served, nothing of worlds is imported.")
    latent_cache: LatentCacheConfig | None = Field(
        None, description="Reuse between the video requests; None: off, nothing of it is imported."
    )
    jobs: Jobs = Jobs()
    http: Http = Http()

    @model_validator(mode="after")
    def _names_are_unique(self) -> Worldstage:
        names = [model.name for model in self.models]
        names += [model.name for model in self.worlds.models] if self.worlds else []
        if not names:
            raise ValueError("models: got none, expected a model in `models` or in `worlds.models`")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"models: name used twice: {twice}")
        return self
