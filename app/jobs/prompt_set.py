"""Prompts and seeds of a calibration or an acceptance run: a YAML file, fixed before the run, named by its digest."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

import yaml
from pydantic import Field, model_validator

from deployments.stage_cache.closed import Closed


class PromptSetError(ValueError):
    """Two sets are not apart, or one is not what a run needs."""


class Video(NamedTuple):
    """One video of a set."""

    prompt: str
    seed: int

    @property
    def name(self) -> str:
        """Short, unique and fit for a file name."""
        return f"{hashlib.sha256(self.prompt.encode()).hexdigest()[:10]}-{self.seed}"


class Prompt(Closed):
    """One text and what it was chosen to cover."""

    kind: str = Field(description="static, slow, fast, camera, ...: of the report, no code decides by it.")
    text: str = Field(min_length=1)


class PromptSet(Closed):
    """See the module's docstring.  Every prompt is run with every seed."""

    format: Literal["worldstage-prompts/1"]
    purpose: Literal["calibration", "acceptance"]
    seeds: tuple[int, ...] = Field(min_length=1)
    prompts: tuple[Prompt, ...] = Field(min_length=1)

    def videos(self) -> tuple[Video, ...]:
        """Seed by seed, so that the first videos are all of different prompts."""
        return tuple(Video(prompt.text, seed) for seed in self.seeds for prompt in self.prompts)

    def first(self, prompts: int | None, seeds: int | None) -> PromptSet:
        """The set cut down to its first prompts and seeds; it has a digest of its own.  None keeps all."""
        return self.model_copy(update={"prompts": self.prompts[:prompts], "seeds": self.seeds[:seeds]})

    @classmethod
    def read(cls, path: Path) -> PromptSet:
        """Parse and validate a file; a pydantic ValidationError (a ValueError) names every wrong field."""
        return cls.model_validate(yaml.safe_load(path.read_text()))

    def to_yaml(self) -> str:
        """The file form; `read` is the inverse."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120))

    @model_validator(mode="after")
    def _no_video_twice(self) -> PromptSet:
        counts = Counter(_words(prompt.text) for prompt in self.prompts)
        twice = [prompt.text for prompt in self.prompts if counts[_words(prompt.text)] > 1]
        if twice or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"prompts: {twice} say the same, or a seed of {list(self.seeds)} is there twice")
        return self


def require_apart(calibration: PromptSet, acceptance: PromptSet) -> None:
    """Raise PromptSetError if acceptance shows anything that calibration has seen: a seed, a prompt, or its words in
    another order."""
    seen = {_words(prompt.text) for prompt in calibration.prompts}
    prompts = [prompt.text for prompt in acceptance.prompts if _words(prompt.text) in seen]
    seeds = sorted(set(calibration.seeds) & set(acceptance.seeds))
    if prompts or seeds:
        raise PromptSetError(f"prompts: calibration has seen {prompts} and the seeds {seeds}; take unseen ones")


def _words(text: str) -> tuple[str, ...]:
    """What stays of a text when case, commas, articles and order do not count."""
    return tuple(sorted(word for word in text.lower().replace(",", " ").split() if word not in ("a", "an", "the")))
