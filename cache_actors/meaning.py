"""Whether two prompts ask for the same picture, as far as words can tell.

Invariant: every difference between the two must be explained, or they differ.  Sentence embeddings cannot do that: they
put "left" beside "right" and "red" beside "blue".  Explained are only

    articles and auxiliaries        "a dog is running", "the dog running"
    finite verb or participle       "runs", "running"; never "dog" and "dogs": a number is a difference
    listed wordings                 "to the left", "leftwards"; and those of a served model's own world
    one adverb, one word off        "slowly walks", "walks slowly"
    the place of what concerns      "at night, ...", "..., night": time, weather, background and style, one of each kind
      the whole picture
    the place of a fronted phrase   "on the moon, a man walks", "a man walks on the moon"
    the order of whole clauses      unless a pronoun or a word like "then" ties them

so that an unknown word, a role swap, a negation, a colour, a count always part two prompts.  Text in other scripts or
languages is compared by the same rules with fewer words known: it matches more rarely, not more loosely.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cache_actors import lexicon

MEANING_VERSION = 1
"""A calibrated map belongs to one version: raise it when judgements change."""

Wordings = tuple[tuple[str, ...], ...]
"""Groups of word forms or phrases that mean the same to one model; the first of each stands for all."""


@dataclass(frozen=True)
class Difference:
    """What parts two prompts."""

    kind: str
    """A name of `lexicon.KINDS`, number, word or order."""
    query: tuple[str, ...]
    donor: tuple[str, ...]
    """Words that only one of them has; both empty for order."""

    def __str__(self) -> str:
        if self.kind == "order":
            return "order: the same words in other roles"
        return f"{self.kind}: {' '.join(self.query) or 'nothing'} / {' '.join(self.donor) or 'nothing'}"


@dataclass(frozen=True)
class _Clause:
    words: tuple[str, ...]
    """In order, prepositions included, adverbs of manner left out."""
    adverbs: tuple[tuple[int, str], ...]
    """Each with the number of `words` before it."""
    free: bool
    """May change places with other free clauses."""


@dataclass(frozen=True)
class Meaning:
    """A prompt taken apart; made by `Meanings.of`."""

    clauses: tuple[_Clause, ...]
    scene: frozenset[tuple[str, ...]]


class Meanings:
    """Takes prompts apart and compares them.  wordings: of the served model's world, beside the general lexicon."""

    def __init__(self, wordings: Wordings = ()) -> None:
        self._wordings = [
            (re.compile(rf"\b{re.escape(' '.join(_plain(other)))}\b"), " ".join(_plain(group[0])))
            for group in wordings
            for other in sorted(group[1:], key=len, reverse=True)
        ]

    def difference(self, query: str, donor: str) -> Difference | None:
        """None when the two mean the same."""
        a, b = self.of(query), self.of(donor)
        if a.scene == b.scene and _same_clauses(a.clauses, b.clauses):
            return None
        return _explain(_words(a), _words(b))

    def of(self, prompt: str) -> Meaning:
        """Take a prompt apart."""
        text = " ".join(_plain(prompt))
        for pattern, word in lexicon.PHRASES:
            text = pattern.sub(word, text)
        for pattern, word in self._wordings:
            text = pattern.sub(word, text)
        words = [_number(lexicon.SAME.get(word, word)) for word in text.split()]
        ordered = not lexicon.ORDERED.isdisjoint(words)
        clauses = [_without_articles(clause) for clause in _split(words, lexicon.BREAKS)]
        clauses, scene = _hoist([clause for clause in clauses if clause])
        clauses = _glue(_return_fronted(clauses))
        return Meaning(tuple(_clause(words, free=not ordered) for words in clauses), frozenset(scene))


def _plain(text: str) -> list[str]:
    """Lower-case words and breaks: hyphens and quotes part words, other marks go."""
    return re.findall(r"[^\W_]+|[,.;:]", text.lower())


def _number(word: str) -> str:
    return f"#{word}" if word.isdecimal() else word


def _split(words: Sequence[str], breaks: frozenset[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for word in words:
        if word in breaks:
            found.append([])
        else:
            found[-1].append(word)
    return found


def _without_articles(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for i, word in enumerate(words):
        if word not in lexicon.DROPPED:
            kept.append(word)
        elif word in ("a", "an") and not lexicon.INVARIABLE.isdisjoint(words[i + 1 : i + 4]):
            kept.append("#1")  # "a sheep" is one, "sheep" may be many
    return kept


def _phrases(clause: Sequence[str]) -> list[list[str]]:
    """Cut before each preposition."""
    found: list[list[str]] = []
    for word in clause:
        if word in lexicon.PREPOSITIONS or not found:
            found.append([])
        found[-1].append(word)
    return found


def _hoist(clauses: list[list[str]]) -> tuple[list[list[str]], list[tuple[str, ...]]]:
    """Take out what concerns the whole picture; what is said twice of one kind may belong to parts, and stays."""
    found: list[tuple[str, int, list[str]]] = []
    for index, clause in enumerate(clauses):
        phrases = _phrases(clause)
        for phrase in phrases:
            kind = _scene_kind(phrase)
            if kind is not None and (phrase[0] in lexicon.NEUTRAL or len(phrases) == 1):
                found.append((kind, index, phrase))
    times = Counter(kind for kind, _, _ in found)
    kept = [_phrases(clause) for clause in clauses]
    scene: list[tuple[str, ...]] = []
    for kind, index, phrase in found:
        if times[kind] > 1:
            continue
        kept[index].remove(phrase)
        words = phrase[1:] if phrase[0] in lexicon.NEUTRAL else phrase
        scene.append(tuple(w for w in words if kind != "background" or w not in lexicon.BACKGROUND_DEFAULTS))
    return [clause for phrases in kept if (clause := [word for phrase in phrases for word in phrase])], scene


def _scene_kind(phrase: Sequence[str]) -> str | None:
    if phrase[0] in lexicon.PREPOSITIONS and phrase[0] not in lexicon.NEUTRAL:
        return None
    if any(_is_verb(word) for word in phrase) and len(phrase) > 2:
        return None
    return next((kind for kind, words in lexicon.SCENE.items() if not words.isdisjoint(phrase)), None)


def _return_fronted(clauses: list[list[str]]) -> list[list[str]]:
    """A first clause that begins with a preposition and has no verb goes to the end of the next."""
    if len(clauses) > 1 and clauses[0][0] in lexicon.PREPOSITIONS and not any(map(_is_verb, clauses[0])):
        return [clauses[1] + clauses[0], *clauses[2:]]
    return clauses


def _glue(clauses: list[list[str]]) -> list[list[str]]:
    """What has no verb cannot stand alone: it stays behind the clause before it, or before the first."""
    glued: list[list[str]] = []
    for clause in clauses:
        if glued and not (any(map(_is_verb, clause)) and any(map(_is_verb, glued[-1]))):
            glued[-1] += ["&", *clause]
        else:
            glued.append(list(clause))
    return glued


def _clause(words: Sequence[str], free: bool) -> _Clause:
    adverbs = [w for w in words if _is_manner(w)]
    if len(adverbs) != 1:  # two could swap their verbs
        return _Clause(tuple(words), (), free)
    place = list(words).index(adverbs[0])
    return _Clause((*words[:place], *words[place + 1 :]), ((place, adverbs[0]),), free)


def _is_manner(word: str) -> bool:
    return word.endswith(lexicon.MANNER_ENDING) and word not in lexicon.NOT_MANNER


def _is_verb(word: str) -> bool:
    return not lexicon.VERBS.isdisjoint(_bases(word))


def _bases(word: str) -> set[str]:
    """Forms that `word` may be an inflection of, itself included."""
    found = {word}
    if word.endswith("ing") and len(word) > 5:
        stem = word[:-3]
        found |= {stem, stem + "e"}
        if stem[-1] == stem[-2]:
            found.add(stem[:-1])  # running
        if stem.endswith("y"):
            found.add(stem[:-1] + "ie")  # lying
    elif word.endswith("s") and not word.endswith("ss") and len(word) > 3:
        found.add(word[:-1])
        if word.endswith("es"):
            found.add(word[:-2])
        if word.endswith("ies"):
            found.add(word[:-3] + "y")
    return found


def _same_word(a: str, b: str) -> bool:
    """Equal, or a participle and a finite form of one verb; a bare form and one with -s differ in number."""
    if a == b:
        return True
    if a.endswith("ing") == b.endswith("ing"):
        return False
    return not _bases(a).isdisjoint(_bases(b))


def _same_clause(a: _Clause, b: _Clause) -> bool:
    return (
        len(a.words) == len(b.words)
        and all(map(_same_word, a.words, b.words))
        and len(a.adverbs) == len(b.adverbs)
        and all(x == y and abs(i - j) <= 1 for (i, x), (j, y) in zip(a.adverbs, b.adverbs, strict=True))
    )


def _same_clauses(a: Sequence[_Clause], b: Sequence[_Clause]) -> bool:
    if len(a) != len(b):
        return False
    if not all(clause.free for clause in (*a, *b)):
        return all(map(_same_clause, a, b))
    left = list(b)
    for clause in a:
        match = next((other for other in left if _same_clause(clause, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _words(meaning: Meaning) -> list[str]:
    words = [word for clause in meaning.clauses for word in (*clause.words, *(w for _, w in clause.adverbs))]
    return [*words, *(word for item in meaning.scene for word in item)]


def _explain(query: list[str], donor: list[str]) -> Difference:
    """Name the words that only one has, the kinds of `lexicon.KINDS` first."""
    left = list(donor)
    only_query = []
    for word in query:
        match = next((other for other in left if _same_word(word, other)), None)
        if match is None:
            only_query.append(word)
        else:
            left.remove(match)
    if not only_query and not left:
        return Difference("order", (), ())
    for kind, words in lexicon.KINDS.items():
        mine, theirs = (tuple(w for w in side if w in words) for side in (only_query, left))
        if mine or theirs:
            return Difference(kind, mine, theirs)
    numbers = any(w.startswith("#") for w in (*only_query, *left))
    inflected = any(not _bases(x).isdisjoint(_bases(y)) for x in only_query for y in left)
    return Difference("number" if numbers or inflected else "word", tuple(only_query), tuple(left))
