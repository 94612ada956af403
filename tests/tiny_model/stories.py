"""Short stories for children from a seeded grammar: the text that the tiny model is trained on.

A story is one of the openings and one of the plots of `plots.txt`; its names, things and places are drawn once, from
`words.txt`, and stay the same to its end. The generator counts the information in its choices, so that a language
model can be judged against the entropy of the very source that it was trained on.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Option = TypeVar("Option")
Plot = list[list[str]]  # paragraphs of sentence templates


def read_words(path: Path) -> dict[str, list[list[str]]]:
    """For each name of `words.txt` its lines, split at the commas."""
    words: dict[str, list[list[str]]] = {}
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith(";"):
            name, _, listed = line.partition(": ")
            words.setdefault(name, []).append(listed.split(", "))
    return words


def read_plots(path: Path, kind: str) -> list[Plot]:
    """The parts of `plots.txt` of one kind, "Opening" or "Plot"."""
    _, *parts = re.split(r"^== (.*) ==\n", path.read_text("utf-8"), flags=re.MULTILINE)
    named = zip(parts[::2], parts[1::2], strict=True)
    return [
        [paragraph.splitlines() for paragraph in body.strip().split("\n\n")]
        for name, body in named
        if name.startswith(kind)
    ]


FOLDER = Path(__file__).parent
WORDS = read_words(FOLDER / "words.txt")
OPENINGS = read_plots(FOLDER / "plots.txt", "Opening")
PLOTS = read_plots(FOLDER / "plots.txt", "Plot")


@dataclass(frozen=True, slots=True)
class Character:
    """Somebody in a story; in a template `{hero}` is the name and `{hero.he}` "he" or "she".

    Attributes:
        name: "Pip".
        kind: "girl", "boy" or the animal.
        title: How the narrator introduces the character: "Mia", but "Pip the fox".
        he: The subject pronoun.
        him: The object pronoun.
        his: The possessive pronoun.
    """

    name: str
    kind: str
    title: str
    he: str
    him: str
    his: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Place:
    """Where a story happens: "the garden", `at` "in the garden", with a few spots to hide in."""

    name: str
    at: str
    spots: list[str]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Story:
    """A story, and the nats of choices that went into it: no less than the information in its text."""

    text: str
    nats: float


class Dice:
    """A source of choices that counts the nats it has given away."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.nats = 0.0

    def choose(self, options: Sequence[Option]) -> Option:
        """One of the options, all equally likely."""
        self.nats += math.log(len(options))
        return self.source.choice(options)


class Cast(dict[str, object]):
    """What the slots of one story stand for; a slot is drawn when a sentence first asks for it."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.dice = dice

    def __missing__(self, slot: str) -> object:
        self[slot] = self._draw(slot)
        return self[slot]

    def _draw(self, slot: str) -> object:
        if slot in ("hero", "friend"):
            return draw_character(self.dice, taken={str(value) for value in self.values()})
        if slot == "place":
            name, at, *spots = self.dice.choose(WORDS["place"])
            return Place(name, at, spots)
        if slot in ("spot", "other_spot"):
            place = self["place"]
            assert isinstance(place, Place)
            return self.dice.choose([spot for spot in place.spots if spot not in self.values()])
        return self.dice.choose(WORDS[slot][0])


def draw_character(dice: Dice, taken: set[str]) -> Character:
    """A child or an animal whose name is not taken."""
    child, pronouns = dice.choose((("girl", ("she", "her", "her")), ("boy", ("he", "him", "his"))))
    is_animal = dice.choose((True, False))
    names = WORDS["animal_name" if is_animal else child][0]
    name = dice.choose([name for name in names if name not in taken])
    if is_animal:
        kind = dice.choose(WORDS["animal"][0])
        return Character(name, kind, f"{name} the {kind}", *pronouns)
    return Character(name, child, name, *pronouns)


def expand(template: str, dice: Dice) -> str:
    """The template with each outermost `[a|b]` replaced by one of its alternatives, itself expanded."""
    pieces: list[str] = []
    options: list[str] = []
    depth = start = 0
    for position, character in enumerate(template):
        if character == "[":
            if depth == 0:
                pieces.append(template[start:position])
                options, start = [], position + 1
            depth += 1
        elif character == "|" and depth == 1:
            options.append(template[start:position])
            start = position + 1
        elif character == "]":
            depth -= 1
            if depth == 0:
                options.append(template[start:position])
                pieces.append(expand(dice.choose(options), dice))
                start = position + 1
    return "".join([*pieces, template[start:]])


def write_sentence(template: str, cast: Cast) -> str:
    """The sentence that a template gives, its spaces, articles and capitals put right; it may be empty."""
    text = expand(template, cast.dice).format_map(cast)
    text = re.sub(r" +(?=[ .])|^ +| +$", "", text)
    text = re.sub(r"\b([Aa])(?= [aeiou])", r"\1n", text)
    return re.sub(r"(^|[.!?] )([a-z])", lambda match: match[1] + match[2].upper(), text)


def tell_story(source: random.Random) -> Story:
    """A story of four or five paragraphs, one a line."""
    dice = Dice(source)
    cast = Cast(dice)
    paragraphs = [*dice.choose(OPENINGS), *dice.choose(PLOTS)]
    written = [[write_sentence(template, cast) for template in paragraph] for paragraph in paragraphs]
    return Story("\n".join(" ".join(filter(None, sentences)) for sentences in written), dice.nats)


def tell_stories(seed: int) -> Iterator[Story]:
    """Stories without end; the same seed tells the same ones."""
    source = random.Random(seed)
    while True:
        yield tell_story(source)
