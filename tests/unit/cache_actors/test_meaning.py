"""Only listed, harmless differences pass; whatever else differs parts two prompts, known word or not."""

from __future__ import annotations

import pytest

from cache_actors.meaning import Meanings

SHAPES = Meanings((("moves", "drifts"), ("moving", "drifting"), ("rests", "stays still"), ("circle", "ball", "disc")))


def difference(a: str, b: str, meanings: Meanings | None = None) -> str | None:
    meanings = meanings or Meanings()
    there, back = meanings.difference(a, b), meanings.difference(b, a)
    assert (there is None) == (back is None)
    return None if there is None else str(there)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("A dog runs on grass.", "the dog is running on grass"),
        ("a ball moves to the left", "A ball moving leftwards"),
        ("two gray cats sit under a tree", "2 grey cats sitting beneath the tree"),
        ("a man slowly walks", "a man walks slowly"),
        ("at night, a car drives past", "a car drives past at night"),
        ("a fox jumps, morning light", "In the morning light, a fox jumps"),
        ("a dog barks and a cat sleeps", "a cat sleeps while a dog barks"),
        ("on the moon, a man walks", "a man walks on the moon"),
        ("a cup with no handle", "a cup without a handle"),
        ("close-up of a bee", "Close up of a bee"),
        ("ein Hund läuft durch den Schnee", "Ein Hund läuft durch den Schnee"),
    ],
)
def test_harmless_differences_pass(a: str, b: str) -> None:
    assert difference(a, b) is None


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ("a ball moves left", "a ball moves right", "direction"),
        ("a red ball moves", "a blue ball moves", "colour"),
        ("a dog runs", "a dog does not run", "negation"),
        ("a dog runs", "no dog runs", "negation"),
        ("two dogs run", "three dogs run", "number"),
        ("a dog runs", "dogs run", "number"),
        ("a sheep grazing", "sheep grazing", "number"),
        ("a small boat", "a large boat", "size"),
        ("a man walks slowly", "a man walks quickly", "speed"),
        ("a street at night", "a street at noon", "time"),
        ("a fox runs", "a fox sleeps", "word"),
        ("a zorble frums", "a zorble brels", "word"),  # words no list knows
        ("a dog chases a cat", "a cat chases a dog", "order"),
        ("a red box beside a blue ball", "a blue box beside a red ball", "order"),
        ("a man with a hat and a woman with a bag", "a man with a bag and a woman with a hat", "order"),
        ("a cat in the rain and a dog in the fog", "a cat in the fog and a dog in the rain", "order"),
        ("a bird over a boat under a bridge", "a bird under a bridge over a boat", "order"),
        ("a man opens a door, then he sits", "he sits, then a man opens a door", "order"),
        ("a dog, under a table, a cat", "a cat, under a table, a dog", "order"),
        ("a cat chases a dog and a mouse", "a mouse and a cat chases a dog", "order"),
        ("a man slowly opens a door that quickly closes", "a man quickly opens a door that slowly closes", "order"),
        ("black and white cat", "white and black cat", "order"),
        ("a red or blue ball", "a red and blue ball", "word"),
        ("a closed door", "a door closes", "word"),
        ("a fox", "a fox, cinematic", "word"),
        ("a train from Paris to Rome", "a train from Rome to Paris", "order"),
        ("a box to the left of a ball", "a ball to the left of a box", "order"),
        ("a ball on the left", "a ball on the right", "direction"),
        ("a ball moves to the left of a box", "a ball moves to the left", "direction"),
        ("the woman he loves sings", "the woman she loves sings", "word"),
        ("a 3 second clip", "a 5 second clip", "number"),
        ("一只红色的狐狸在雪地里奔跑", "一只蓝色的狐狸在雪地里奔跑", "word"),
        ("кот спит", "кот бежит", "word"),
    ],
)
def test_differences_of_meaning_are_found_and_named(a: str, b: str, kind: str) -> None:
    found = difference(a, b)
    assert found is not None
    assert found.split(":")[0] == kind


def test_wordings_of_one_model_hold_for_it_alone() -> None:
    a, b = "a red ball drifts to the left and a blue box stays still", "A blue box rests and a red disc moves left"
    assert difference(a, b, SHAPES) is None
    assert difference(a, b) is not None
    assert difference("a red ball drifts left", "a red disc drifts right", SHAPES) == "direction: left / right"


def test_a_background_stands_anywhere_but_two_do_not() -> None:
    a = "a red ball moves left on a plain navy background"
    assert difference(a, "against a navy backdrop, a red ball moves left") is None
    assert difference(a, "a navy ball moves left on a plain red background") is not None


def test_every_single_changed_word_parts() -> None:
    """The rule itself: put an unknown word in the place of any word that carries a picture."""
    prompt = "a tall man slowly opens three red doors behind the house at night while it snows heavily"
    words = prompt.split()
    for i, word in enumerate(words):
        changed = " ".join([*words[:i], "blorp", *words[i + 1 :]])
        assert difference(prompt, changed) is not None, word
        if word not in ("a", "the"):
            assert difference(prompt, " ".join([*words[:i], *words[i + 1 :]])) is not None, word
