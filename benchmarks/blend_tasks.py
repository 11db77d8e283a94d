"""Questions over several documents, made up with a seed: what is asked for stands in no text elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from lwkv.demo.blend_trial import Task

_COLOURS = ("red", "blue", "green", "amber", "violet", "silver", "black", "white", "copper", "golden")
_THINGS = ("box", "locker", "gate", "safe", "cabinet", "vault", "trunk", "depot", "archive", "tower")
_FIRST = ("Mara", "Jonas", "Ilse", "Tobin", "Petra", "Anders", "Livia", "Ronan", "Greta", "Casper")
_LAST = ("Lindt", "Harrow", "Vesely", "Okafor", "Brandt", "Moreau", "Silva", "Tanaka", "Novak", "Quill")
_PLACES = ("Corvin", "Ashdown", "Merrow", "Tarn", "Holloway", "Briar", "Fenwick", "Larkin", "Oswin", "Pell")
_KINDS = ("observatory", "brewery", "hospital", "library", "shipyard", "foundry", "school", "mill")
_TOWNS = (
    "Helmsby",
    "Dunmere",
    "Castor",
    "Wexley",
    "Orrin",
    "Sandvik",
    "Torbay",
    "Kelso",
    "Marburg",
    "Ludlow",
)
_SUBJECTS = (
    *("The caretaker", "A neighbour", "The old postman", "One of the visitors", "The night watch"),
    *("A student", "The gardener", "The committee", "A traveller", "The clerk"),
)
_VERBS = ("noticed", "described", "wrote about", "painted", "remembered", "complained about", "photographed")
_OBJECTS = (
    *("the fog over the river", "a bench beside the path", "the broken clock", "rain on the tin roof"),
    *("the smell of fresh bread", "a cart full of apples", "the long queue", "two sleeping dogs"),
)
_TIMES = (
    *("in the early morning", "shortly before noon", "on a windy day", "after the market closed"),
    *("during the last winter", "before the holidays", "late in the evening", "some years ago"),
)


def _filler(draw: Random) -> str:
    return f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)} {draw.choice(_TIMES)}."


def _document(draw: Random, facts: Sequence[str], num_fillers: int) -> str:
    """The facts among sentences that say nothing of use."""
    sentences = [*facts, *(_filler(draw) for _ in range(num_fillers))]
    draw.shuffle(sentences)
    return " ".join(sentences)


def needle(seed: int, num_documents: int = 5, num_fillers: int = 8) -> Task:
    """Two codes in every document, one of which is asked for."""
    draw = Random(f"needle {seed}")
    names = draw.sample([f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS], 2 * num_documents)
    codes = {name: str(draw.randrange(10000, 100000)) for name in names}
    facts = [f"The code of the {name} is {code}." for name, code in codes.items()]
    documents = [_document(draw, facts[i : i + 2], num_fillers) for i in range(0, len(facts), 2)]
    asked = draw.choice(names)
    return Task(
        tuple(documents),
        f"What is the code of the {asked}?",
        f"The code of the {asked} is",
        codes[asked],
    )


def two_hops(seed: int, num_documents: int = 5, num_fillers: int = 8) -> Task:
    """Who works where is in one document, and in which town that is in another one."""
    draw = Random(f"two hops {seed}")
    people = [f"{a} {b}" for a, b in zip(draw.sample(_FIRST, 5), draw.sample(_LAST, 5), strict=True)]
    places = [f"{name} {draw.choice(_KINDS)}" for name in draw.sample(_PLACES, 5)]
    towns = draw.sample(_TOWNS, 5)
    facts = [f"{who} works at the {place}." for who, place in zip(people, places, strict=True)]
    facts += [f"The {place} stands in the town of {town}." for place, town in zip(places, towns, strict=True)]
    draw.shuffle(facts)
    parts = [facts[i::num_documents] for i in range(num_documents)]
    asked = draw.randrange(len(people))
    return Task(
        tuple(_document(draw, part, num_fillers) for part in parts),
        f"In which town does {people[asked]} work?",
        f"{people[asked]} works at the {places[asked]}, in the town of",
        towns[asked],
    )
