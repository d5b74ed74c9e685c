"""The bundled checkpoint is what the model card says it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file

from app.jobs.train_shapes.bundle import MAX_BYTES
from app.jobs.train_shapes.grammar import vocabulary
from app.jobs.train_shapes.layout import SIDE
from app.jobs.train_shapes.reader import agrees, all_right, read
from app.jobs.train_shapes.scene import Scene, Shape

CHECKPOINT = Path(__file__).parents[4] / "checkpoints" / "wan-shapes"


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    loaded = WanPipeline.from_pretrained(CHECKPOINT, dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_classes_are_those_of_wan(pipeline: WanPipeline):
    parts = {
        name: type(getattr(pipeline, name)).__name__ for name in ("transformer", "vae", "text_encoder", "scheduler")
    }
    assert parts == {
        "transformer": "WanTransformer3DModel",
        "vae": "AutoencoderKLWan",
        "text_encoder": "UMT5EncoderModel",
        "scheduler": "UniPCMultistepScheduler",
    }
    assert pipeline.tokenizer.is_fast
    assert len(pipeline.transformer.blocks) >= 8  # so that four stages hold two blocks each
    assert pipeline.vae.config.z_dim == 16
    assert pipeline.scheduler.config.use_flow_sigmas
    assert pipeline.scheduler.config.flow_shift == 3.0


def test_it_is_small_and_half_precision():
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*") if path.is_file()) <= MAX_BYTES
    for path in CHECKPOINT.rglob("*.safetensors"):
        assert {value.dtype for value in load_file(path).values()} == {torch.float16}


def test_it_speaks_the_grammar(pipeline: WanPipeline):
    words = pipeline.tokenizer.get_vocab()
    assert [words[word] for word in ("<pad>", "</s>", "<unk>")] == [0, 1, 2]
    assert [words[word] for word in vocabulary()] == list(range(3, len(words)))


def test_the_recorded_evaluation_meets_the_gates():
    report = json.loads((CHECKPOINT / "evaluation.json").read_text())
    assert report["prompts"] == 64
    assert report["steps"]["50"]["all_right"] >= 0.9
    assert report["vae_psnr_db"] >= 34


@pytest.mark.slow
def test_a_prompt_becomes_its_video(pipeline: WanPipeline):
    frames = pipeline(
        "a red square moves right on a black background",
        height=SIDE,
        width=SIDE,
        num_frames=17,
        num_inference_steps=20,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).frames[0]
    reading = read(np.asarray(frames))
    assert all_right(agrees(reading.scene, Scene((Shape("red", "square", "right"),), "black"))), reading
