"""kill -9 of each kind of process while twenty jobs run: all twenty are completed, once each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import write_wan_checkpoint
from tests.e2e.survival import assert_all_intact, run_through_kills
from tests.serving import config, model, serving

KINDS = ["proxy", "controller", "ingress", "driver", "rank 0 tiny", "rank 1 tiny", "text tiny", "decoder tiny"]
FRAMES = 33


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_jobs_survive_the_loss_of_every_process(tmp_path: Path):
    write_wan_checkpoint(tmp_path / "checkpoint")
    served_model = model(Path("checkpoint"), topology={"pp": 2, "cfg": 1})
    with serving(config([served_model]), tmp_path) as served:
        requests = [
            {"prompt": "a red circle", "seed": seed, "num_inference_steps": 200, "num_frames": FRAMES}
            for seed in range(20)
        ]
        run_through_kills(served, requests, KINDS)
        assert_all_intact(served, FRAMES)


@pytest.mark.timeout(600)
def test_jobs_survive_the_loss_of_the_driver_and_of_a_rank(tmp_path: Path):
    """The default share of the test above."""
    write_wan_checkpoint(tmp_path / "checkpoint")
    with serving(config([model(Path("checkpoint"), topology={"pp": 2, "cfg": 1})]), tmp_path) as served:
        requests = [
            {"prompt": "a red circle", "seed": s, "num_inference_steps": 200, "num_frames": 9} for s in range(4)
        ]
        run_through_kills(served, requests, ["driver", "rank 1 tiny"])
        assert_all_intact(served, 9)
