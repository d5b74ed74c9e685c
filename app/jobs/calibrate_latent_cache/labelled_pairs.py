"""Pairs of prompts with a judgement: same video or another one.

Two sources: natural prompts judged by hand (two files, of which only one was looked at while the guard's lexicon was
made), and the shapes world, whose grammar knows the meaning of every sentence: paraphrases of held-out scenes, and
scenes that differ in one attribute or in which shape has which colour.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from app.jobs.train_shapes import grammar
from app.jobs.train_shapes.scene import Scene, opposites
from cache_actors.meaning import Wordings

NATURAL = {name: Path(__file__).with_name(f"natural_{name}.txt") for name in ("development", "held_out")}


@dataclass(frozen=True)
class LabelledPair:
    """Two prompts and whether they ask for the same video."""

    query: str
    donor: str
    same: bool
    what: str
    """What differs, or "wording"."""
    source: str
    """natural_development, natural_held_out, shapes or own."""


def natural_pairs(name: str) -> list[LabelledPair]:
    """name: development or held_out."""
    return read_pairs(NATURAL[name], f"natural_{name}")


def read_pairs(path: Path, source: str) -> list[LabelledPair]:
    """Raises ValueError for a line that is none of `= prompt`, `+ same`, `- what | different`, `# remark`."""
    pairs: list[LabelledPair] = []
    donor = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark, _, rest = line.partition(" ")
        if mark == "=":
            donor = rest
        elif mark == "+" and donor:
            pairs.append(LabelledPair(rest, donor, True, "wording", source))
        elif mark == "-" and donor and " | " in rest:
            what, query = rest.split(" | ", 1)
            pairs.append(LabelledPair(query, donor, False, what, source))
        elif mark != "#":
            raise ValueError(f"{path.name}:{number}: got {line!r}, expected '= p', then '+ p' or '- what | p', or '#'")
    return pairs


def shapes_pairs(seed: int, scenes: int, paraphrases: int = 1) -> list[LabelledPair]:
    """For each of `scenes` held-out prompts: paraphrases, one scene for each changed attribute, and swapped colours.

    The same seed gives the same list; half of the prompts are in wordings that the model's training never held.
    """
    rng = random.Random(f"pairs {seed}")
    return [
        pair
        for text, scene in grammar.held_out_prompts(seed, scenes)
        for pair in _of_scene(text, scene, paraphrases, rng)
    ]


def _of_scene(text: str, scene: Scene, paraphrases: int, rng: random.Random) -> Iterator[LabelledPair]:
    others = [other for other in grammar.paraphrases(scene, paraphrases + 1, rng) if other != text]
    for other in others[:paraphrases]:
        yield LabelledPair(other, text, True, "wording", "shapes")
    changed = opposites(scene, rng)
    if len(scene.shapes) == 2:
        a, b = scene.shapes
        swapped = replace(scene, shapes=(replace(a, colour=b.colour), replace(b, colour=a.colour)))
        if set(swapped.shapes) != set(scene.shapes):
            changed["colours swapped"] = swapped
    for what, changed_scene in changed.items():
        yield LabelledPair(grammar.caption(changed_scene, rng), text, False, what, "shapes")


def shapes_wordings() -> Wordings:
    """What the shapes world says in several ways beyond common English: its own synonyms, from its grammar."""
    tables = (grammar.NOUNS, grammar.SIZE_WORDS, grammar.SPEED_WORDS, grammar.TEXTURE_WORDS)
    groups = [tuple(word for word in words if word) for table in tables for words in table.values()]
    finite, participle = (tuple(forms[i] for forms in grammar.VERBS.values()) for i in (0, 1))
    still = [tuple(forms[i] for forms in grammar.STILL_VERBS) for i in (0, 1)]
    return tuple(group for group in (*groups, finite, participle, *still) if len(group) > 1)
