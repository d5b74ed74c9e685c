"""English words whose part in a prompt is known: for `meaning`, which refuses every difference that it cannot explain.

A missing word costs a hit, a wrong one costs a false hit: so only wordings that never change a picture stand in
`SAME` and `PHRASES`, and names of kinds serve the report alone.
"""

from __future__ import annotations

import re


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


PHRASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"\b(?:{pattern})\b"), word)
    for pattern, word in (
        (r"(?:does|do|did|is|are|was|were|has|have|can) ?not|(?:does|do|did|is|are|was|were)n t", "not"),
        (r"with no", "without"),
        (r"from (?:the )?left to (?:the )?right", "rightwards"),
        (r"from (?:the )?right to (?:the )?left", "leftwards"),
        (r"(?:to|on) the left(?: side)? of", "left_of"),
        (r"(?:to|on) the right(?: side)? of", "right_of"),
        (r"(?:to|towards?) the left(?: side)?", "leftwards"),
        (r"(?:to|towards?) the right(?: side)?", "rightwards"),
        (r"(?:to|towards?) the top(?! of)", "upwards"),
        (r"(?:to|towards?) the bottom(?! of)", "downwards"),
        (r"in front of", "in_front_of"),
        (r"next to", "beside"),
        (r"on top of", "on_top_of"),
        (r"away from", "away_from"),
        (r"far from", "far_from"),
        (r"out of", "out_of"),
        (r"close up", "close_up"),
        (r"time ?lapse", "time_lapse"),
        (r"slow ?mo(?:tion)?", "slow_motion"),
        (r"(?:counter|anti) ?clockwise", "counterclockwise"),
        (r"window sill", "windowsill"),
        (r"there (?:is|are)", ""),
    )
)
"""Applied in this order to lower-case words with single blanks; word_with_underscore is one word from then on."""

NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)

SAME = {
    "leftward": "left",
    "leftwards": "left",
    "rightward": "right",
    "rightwards": "right",
    "upward": "up",
    "upwards": "up",
    "downward": "down",
    "downwards": "down",
    "toward": "towards",
    "grey": "gray",
    "violet": "purple",
    "little": "small",
    "big": "large",
    "fast": "quickly",
    "rapidly": "quickly",
    "beneath": "under",
    "underneath": "under",
    "below": "under",
    "above": "over",
    "upon": "on",
    "onto": "on",
    "backdrop": "background",
    "nighttime": "night",
    "bike": "bicycle",
    "automobile": "car",
    "woods": "forest",
    "color": "colour",
    **{word: f"#{number}" for number, word in enumerate(NUMBERS)},
}

DROPPED = _set("a an the is are was were be been being that which who")
"""Carry no picture of their own; `a` before an invariable noun does, see `INVARIABLE`."""

BREAKS = frozenset({"and", "while", "but", ",", ".", ";", ":"})
"""Between clauses."""

PREPOSITIONS = _set(
    "in on at of over under with without through across into from to towards against behind beside by near around "
    "between among along past after before during for like as in_front_of on_top_of away_from far_from out_of left_of "
    "right_of"
)
"""Each begins a phrase of its own."""

NEUTRAL = frozenset({"in", "at", "on", "during", "over", "under", "against", "in_front_of"})
"""Before a word of `SCENE` they all mean the same."""

SCENE = {
    "time": _set("morning noon afternoon evening night midnight dawn dusk sunrise sunset twilight"),
    "weather": _set("rain fog mist storm sunshine drizzle blizzard hail"),
    "background": frozenset({"background"}),
    "style": frozenset({"slow_motion", "time_lapse"}),
}
"""Words that speak of the whole picture, by kind: where they stand in the sentence does not matter."""

BACKGROUND_DEFAULTS = frozenset({"plain"})
"""A background is this when nothing is said."""

ORDERED = _set("then first finally next later he she they it his her its their him them")
"""Sequence words and pronouns: clauses around them may not change places."""

INVARIABLE = _set(
    "sheep fish deer moose salmon trout shrimp squid aircraft spacecraft hovercraft series bison swine cod"
)
"""Nouns with one form for one and many."""

MANNER_ENDING = "ly"
NOT_MANNER = _set("only early family butterfly dragonfly lily ugly belly jelly silly bully italy fly july")

VERBS = _set(
    "appear arrive bark bathe bend bite blow boil bounce bow break breathe brush build burn buy call carry catch "
    "chase cheer clap climb close collapse cook crash crawl cross cry cut cycle dance descend dig dip dive drag "
    "draw drift drink drip drive drop eat enter erupt explode fall feed fight fill flap flicker flip float flow "
    "fly fold follow gallop glide glow grab graze grow hang hit hold hop hover hug hunt jog juggle jump kick kiss "
    "kneel knit land laugh launch lean leap leave lick lie lift look march melt move nod open orbit paint pan "
    "pass perch perform pick play plough point pour pray pull push read rest ride rise roam roar roll rotate run "
    "rush sail scatter score scream set shake shine shoot shout sing sink sip sit skate ski sleep slide slip "
    "smile sneeze spill spin splash spread sprint squat stand stare stay step stir stretch stroll surf sway sweep "
    "swim swing take talk tap throw tilt toss touch travel turn twirl type wade wait walk wander wash watch wave "
    "weave whisper wink work write yawn zoom "
)
"""Common verbs, base form: a clause with one can stand alone.  Words as often nouns (rain, light) are left out."""

KINDS = {
    "colour": _set(
        "red orange yellow green cyan blue purple white black gray navy brown teal pink gold silver beige maroon "
        "turquoise crimson scarlet colour"
    ),
    "direction": _set(
        "left right up down towards away_from left_of right_of in_front_of behind over under into out_of clockwise "
        "counterclockwise forwards backwards north south east west inside outside in out"
    ),
    "negation": _set("no not never without none nobody nothing empty"),
    "size": _set("small large tiny huge tall short wide narrow thick thin"),
    "speed": _set("slowly quickly slow slow_motion time_lapse"),
    "time": SCENE["time"] | {"day", "spring", "summer", "autumn", "winter"},
    "weather": SCENE["weather"] | {"snow", "wind", "sunny", "rainy", "cloudy", "foggy", "stormy"},
}
"""Names for differences in reports."""
