"""Stage `bundle`: what WanPipeline loads, copied out of the training folder, and its size checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

FOLDERS = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
FILES = ("model_index.json", "sheet.png", "evaluation.json")
MAX_BYTES = 18_000_000


def bundle(source: Path, target: Path) -> dict[str, int]:
    """Copies the checkpoint from `source` to `target` (its README.md stays) and returns {"bytes": size of `target`};
    raises when that is over 18 MB."""
    missing = [name for name in (*FOLDERS, *FILES) if not (source / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"out: {source} lacks {', '.join(missing)}; run the stages vae, denoiser and evaluate with this --out first"
        )
    target.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        shutil.copytree(source / name, target / name, dirs_exist_ok=True)
    for name in FILES:
        shutil.copy(source / name, target / name)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        raise ValueError(
            f"checkpoint: got {size} bytes in {target}, allowed are {MAX_BYTES}; choose narrower models in recipe.py"
        )
    report = {"bytes": size}
    print(f"bundle: {json.dumps(report)}", flush=True)
    return report
