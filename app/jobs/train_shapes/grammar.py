"""How a scene is said: a grammar with several wordings for one meaning, and its inverse.

    caption    = clauses [background] [pan] | background "," clauses [pan]
    clauses    = clause | clause ("and" | "while") clause
    clause     = article [size] colour noun (verb phrase, finite or participle)
    verb       = move | glide | drift | slide | travel, or rest | stay still | stand still
    direction  = "left" | "leftwards" | "to the left" | "towards the left"; up: "to the top", ...
    background = ("on" | "over" | "against" | "in front of") "a" [texture] colour ("background" | "backdrop")
    pan        = "," "camera panning left" | ("," | "while") "the camera pans left"

`parse(caption(scene, rng)) == scene` for every scene and wording, up to the order of two shapes. Some (verb,
direction form) pairs are held out: no training caption holds them. Words are lower case and split at blanks, a comma
is a word of its own. Imports nothing heavy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from app.jobs.train_shapes.scene import BACKGROUNDS, COLOURS, Scene, Shape, draw_scene, stated, unstate

NOUNS = {
    "circle": ("circle", "ball", "disc"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "ring": ("ring", "hoop"),
    "star": ("star",),
    "cross": ("cross",),
}
COLOUR_WORDS = {**{name: (name,) for name in COLOURS}, "purple": ("purple", "violet")}
BACKGROUND_WORDS = {**{name: (name,) for name in BACKGROUNDS}, "gray": ("gray", "grey")}
SIZE_WORDS = {"small": ("small", "little"), "large": ("large", "big")}
SPEED_WORDS = {"slow": ("slowly", "gently"), "fast": ("quickly", "fast")}
TEXTURE_WORDS = {"plain": ("", "plain"), "gradient": ("gradient", "shaded"), "stripes": ("striped",)}
VERBS = {
    "move": ("moves", "moving"),
    "glide": ("glides", "gliding"),
    "drift": ("drifts", "drifting"),
    "slide": ("slides", "sliding"),
    "travel": ("travels", "travelling"),
}
STILL_VERBS = (("rests", "resting"), ("stays still", "staying still"), ("stands still", "standing still"))
DIRECTION_FORMS = {
    "bare": {"left": "left", "right": "right", "up": "up", "down": "down"},
    "wards": {"left": "leftwards", "right": "rightwards", "up": "upwards", "down": "downwards"},
    "to": {"left": "to the left", "right": "to the right", "up": "to the top", "down": "to the bottom"},
    "towards": {
        "left": "towards the left",
        "right": "towards the right",
        "up": "towards the top",
        "down": "towards the bottom",
    },
}
HELD_OUT_WORDINGS = (
    ("drift", "towards"),
    ("slide", "wards"),
    ("travel", "bare"),
)  # (verb, direction form), both common in other pairs
PREPOSITIONS = ("on", "over", "against", "in front of")
GROUND_NOUNS = ("background", "backdrop")


def _motion(shape: Shape, finite: bool, rng: random.Random, held_out: bool) -> str:
    form = 0 if finite else 1
    if shape.direction == "still":
        return rng.choice(STILL_VERBS)[form]
    pairs = (
        HELD_OUT_WORDINGS
        if held_out
        else [(v, d) for v in VERBS for d in DIRECTION_FORMS if (v, d) not in HELD_OUT_WORDINGS]
    )
    verb, direction_form = rng.choice(pairs)
    words = [VERBS[verb][form], DIRECTION_FORMS[direction_form][stated(shape.direction, "direction")]]
    if shape.speed is not None:
        words.insert(rng.choice((1, 2)), rng.choice(SPEED_WORDS[shape.speed]))
    return " ".join(words)


def _clause(shape: Shape, finite: bool, rng: random.Random, held_out: bool) -> str:
    adjectives = [] if shape.size is None else [rng.choice(SIZE_WORDS[shape.size])]
    adjectives.append(rng.choice(COLOUR_WORDS[stated(shape.colour, "colour")]))
    article = "an" if adjectives[0][0] in "aeiou" else "a"
    return " ".join(
        [article, *adjectives, rng.choice(NOUNS[stated(shape.kind, "kind")]), _motion(shape, finite, rng, held_out)]
    )


def caption(scene: Scene, rng: random.Random, held_out: bool = False) -> str:
    """One wording of `scene`, drawn with `rng`; what is None in the scene is left out.

    colour, kind and direction of each shape must be stated. With `held_out` every moving shape takes a held-out
    wording.
    """
    shapes = list(scene.shapes)
    rng.shuffle(shapes)
    finite = rng.random() < 0.6
    text = rng.choice((" and ", " while ")).join(_clause(shape, finite, rng, held_out) for shape in shapes)
    if scene.background is not None:
        texture = rng.choice(TEXTURE_WORDS[scene.texture or "plain"])
        words = ["a", texture, rng.choice(BACKGROUND_WORDS[scene.background]), rng.choice(GROUND_NOUNS)]
        ground = rng.choice(PREPOSITIONS) + " " + " ".join(word for word in words if word)
        text = f"{text} {ground}" if rng.random() < 0.7 else f"{ground}, {text}"
    if scene.pan in ("left", "right"):
        text += rng.choice((", the camera pans ", " while the camera pans ", ", camera panning ")) + scene.pan
    return text


def paraphrases(scene: Scene, count: int, rng: random.Random) -> list[str]:
    """`count` different captions that all mean `scene`."""
    found: dict[str, None] = {}
    misses = 0
    while misses < 1000:
        before = len(found)
        found[caption(scene, rng)] = None
        if len(found) == count:
            return list(found)
        misses = 0 if len(found) > before else misses + 1
    raise ValueError(
        f"count: got {count}, but only {len(found)} wordings of this scene were found; ask for at most that many"
    )


def held_out_prompts(seed: int, count: int) -> list[tuple[str, Scene]]:
    """`count` different prompts with their meaning, none of which training has seen: held-out shapes, half of them
    also in held-out wordings.

    Size and speed are stated in some; colour, kind, direction and background in all. The same seed gives the same list.
    """
    rng = random.Random(f"held out {seed}")
    found: dict[str, Scene] = {}
    while len(found) < count:
        full = draw_scene(rng, held_out=True)
        stated = replace(unstate(full, rng), background=full.background, texture=full.texture, pan=full.pan)
        found.setdefault(caption(stated, rng, held_out=len(found) % 2 == 1), stated)
    return list(found.items())


def tokens(text: str) -> list[str]:
    """Words of a caption as the tokenizer sees them: "A red ball, ..." -> ["a", "red", "ball", ",", ...]."""
    return text.lower().replace(",", " , ").split()


def vocabulary() -> list[str]:
    """Every word a caption can hold, sorted."""
    phrases = [*PREPOSITIONS, *GROUND_NOUNS, "a an , and while the camera pans panning"]
    for table in (NOUNS, COLOUR_WORDS, BACKGROUND_WORDS, SIZE_WORDS, SPEED_WORDS, TEXTURE_WORDS, VERBS):
        phrases += [word for words in table.values() for word in words]
    phrases += [phrase for pair in STILL_VERBS for phrase in pair]
    phrases += [phrase for form in DIRECTION_FORMS.values() for phrase in form.values()]
    return sorted({word for phrase in phrases for word in tokens(phrase)})


def _meanings() -> dict[str, tuple[str, str]]:
    """word -> (attribute, value); words without an entry carry no meaning of their own."""
    tables: dict[str, Mapping[str, tuple[str, ...]]] = {
        "kind": NOUNS,
        "colour": COLOUR_WORDS,
        "background": BACKGROUND_WORDS,
        "size": SIZE_WORDS,
        "speed": SPEED_WORDS,
        "texture": TEXTURE_WORDS,
    }
    found = {
        word: (attribute, value)
        for attribute, table in tables.items()
        for value, words in table.items()
        for word in words
        if word
    }
    for form in DIRECTION_FORMS.values():
        found.update({phrase.split()[-1]: ("direction", value) for value, phrase in form.items()})
    for pair in STILL_VERBS:
        found.update({phrase.split()[-1]: ("direction", "still") for phrase in pair})
    return found


def parse(text: str) -> Scene:
    """The scene that a caption means; the inverse of `caption`. Raises ValueError for words or sentences outside the
    grammar."""
    meanings, known = _meanings(), set(vocabulary())
    shapes: list[dict[str, str]] = []
    pending: dict[str, str] = {}  # adjectives before their noun
    ground: dict[str, str | None] = {}
    in_pan = False
    for word in tokens(text):
        if word not in known:
            raise ValueError(
                f"caption: word {word!r} is outside the grammar; allowed are {', '.join(sorted(known))}; choose "
                f"other words"
            )
        attribute, value = meanings.get(word, ("", ""))
        if word == "camera":
            in_pan = True
        elif in_pan and attribute == "direction":
            ground["pan"] = value
        elif attribute in ("size", "colour"):
            pending[attribute] = value
        elif attribute == "kind":
            shapes.append({**pending, "kind": value})
            pending = {}
        elif attribute in ("background", "texture"):
            ground[attribute] = value
        elif attribute:
            if not shapes:
                raise ValueError(
                    f"caption: {word!r} stands before any shape in {text!r}; say what moves first, as in 'a red ball "
                    f"moves left'"
                )
            shapes[-1][attribute] = value
    missing = [name for shape in shapes for name in ("colour", "kind", "direction") if name not in shape]
    if not shapes or missing:
        raise ValueError(
            f"caption: {text!r} states no {missing[0] if missing else 'shape'}; say it as in 'a red ball moves left "
            f"on a navy background'"
        )
    if "background" in ground:
        ground = {"texture": "plain", "pan": "none", **ground}
    else:
        ground = {"background": None, "texture": None, "pan": None}
    return Scene(shapes=tuple(Shape(**shape) for shape in shapes), **ground)
