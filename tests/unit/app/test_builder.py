"""A server without the latent cache imports nothing of it, in any of its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCHEMA = {"cache_actors", "cache_actors.closed", "cache_actors.latent_config", "cache_actors.latent_report"}
"""What the configuration and every job's record are made of; `world_config` belongs to worlds."""

PROCESSES = """
import sys, yaml
from pathlib import Path
from app.config import Worldstage
args = yaml.safe_load(Path("configs/demo.yaml").read_text())["applications"][0]["args"]
from app.builder import build
build(Worldstage.model_validate(args))                        # the build task, and what its deployments are made from
import app.driver.video_driver, app.driver.job_run, app.ingress, deployments.gang.stage_replica
import deployments.wan.video_rank, deployments.wan.decoder, deployments.wan.text_encoder
from app.api.application import make_app
print(*(name for name in sys.modules if name.split(".")[0] == "cache_actors" or "latent" in name))
"""


def test_a_server_without_the_latent_cache_imports_nothing_of_it() -> None:
    out = subprocess.run([sys.executable, "-c", PROCESSES], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(out.stdout.splitlines()[-1].split())
    assert {name for name in imported if "world" not in name} == SCHEMA
