"""Questions over several documents, made up with a seed: what is asked for stands in no text elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from lwkv.cli.demo.blend.trial import Task
from lwkv.reference import read_document

_COLOURS = ("red", "blue", "green", "amber", "violet", "silver", "black", "white", "copper", "golden")
_THINGS = ("box", "locker", "gate", "safe", "cabinet", "vault", "trunk", "depot", "archive", "tower")
_NAMES = [f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS]
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


class _Fillers:
    """Sentences of the demo's handbook, which say nothing of what is asked, each of them once."""

    def __init__(self, draw: Random) -> None:
        chapters = read_document().split("\n\n")[1:]
        text = " ".join(chapter.split("\n", 1)[1] for chapter in chapters)
        self._left = re.split(r"(?<=[.]) ", " ".join(text.split()))
        draw.shuffle(self._left)

    def document(self, draw: Random, facts: Sequence[str], num_fillers: int) -> str:
        """The facts among so many sentences."""
        sentences = [*facts, *(self._left.pop() for _ in range(num_fillers))]
        draw.shuffle(sentences)
        return " ".join(sentences)


def needle(seed: int, num_documents: int = 5, num_fillers: int = 5) -> Task:
    """A code in one of the documents; nothing like it is in the others."""
    draw = Random(f"needle {seed}")
    name, code = draw.choice(_NAMES), _code(draw)
    fillers, holder = _Fillers(draw), draw.randrange(num_documents)
    facts = [[_says(name, code)] if number == holder else [] for number in range(num_documents)]
    documents = [fillers.document(draw, part, num_fillers) for part in facts]
    return _asked_for(name, code, documents)


def look_alikes(seed: int, num_documents: int = 5, num_fillers: int = 4) -> Task:
    """Two codes in every document, one of which is asked for."""
    draw = Random(f"look-alikes {seed}")
    codes = {name: _code(draw) for name in draw.sample(_NAMES, 2 * num_documents)}
    facts, fillers = [_says(*item) for item in codes.items()], _Fillers(draw)
    documents = [fillers.document(draw, facts[i : i + 2], num_fillers) for i in range(0, len(facts), 2)]
    name = draw.choice(list(codes))
    return _asked_for(name, codes[name], documents)


def cut_facts(seed: int, num_documents: int = 5, num_fillers: int = 4) -> Task:
    """A text cut between names and their codes: only the documents' order says which belong together."""
    draw = Random(f"cut facts {seed}")
    codes = {name: _code(draw) for name in draw.sample(_NAMES, num_documents - 1)}
    fillers = _Fillers(draw)
    documents = [fillers.document(draw, (), num_fillers) for _ in range(num_documents)]
    for number, (name, code) in enumerate(codes.items()):
        documents[number] += f" The code of the {name}"
        documents[number + 1] = f"is {code}. {documents[number + 1]}"
    name = draw.choice(list(codes))
    return _asked_for(name, codes[name], documents)


def _code(draw: Random) -> str:
    return str(draw.randrange(10_000, 100_000))


def _says(name: str, code: str) -> str:
    return f"The code of the {name} is {code}."


def _asked_for(name: str, code: str, documents: Sequence[str]) -> Task:
    return Task(tuple(documents), f"What is the code of the {name}?", f"The code of the {name} is", code)


def two_hops(seed: int, num_documents: int = 5, num_fillers: int = 4) -> Task:
    """Who works where is in one document, and in which town that is in another one."""
    draw = Random(f"two hops {seed}")
    people = [f"{a} {b}" for a, b in zip(draw.sample(_FIRST, 5), draw.sample(_LAST, 5), strict=True)]
    places = [f"{name} {draw.choice(_KINDS)}" for name in draw.sample(_PLACES, 5)]
    towns = draw.sample(_TOWNS, 5)
    facts = [f"{who} works at the {place}." for who, place in zip(people, places, strict=True)]
    facts += [f"The {place} stands in the town of {town}." for place, town in zip(places, towns, strict=True)]
    draw.shuffle(facts)
    parts = [facts[i::num_documents] for i in range(num_documents)]
    fillers = _Fillers(draw)
    asked = draw.randrange(len(people))
    return Task(
        tuple(fillers.document(draw, part, num_fillers) for part in parts),
        f"In which town does {people[asked]} work?",
        f"{people[asked]} works at the {places[asked]}, in the town of",
        towns[asked],
    )
