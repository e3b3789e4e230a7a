"""What is wrong with a data set goes in under its numbers; rows with names, and JSON, come out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vitkit.data.source import UNLABELLED, DataSet
from vitkit.evaluate.problems import SHOWN_NEIGHBOURS, Doubt, Match, Place

Cell = str | int | float | bool | None
Row = dict[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Near-duplicates and doubtful labels of a data set, whose splits hold the images that could be read."""

    data: DataSet
    matches: Sequence[Match]
    doubts: Sequence[Doubt] | None
    """None where no model was given to judge labels by."""
    voting: str
    """The split whose images are the neighbours."""
    model: str | None = None
    within: bool = False

    def file(self, place: Place) -> str:
        """The image's name."""
        return self.data.splits[place.split].name(place.index)

    def label(self, place: Place) -> str | None:
        """The class that the image is said to be of."""
        number = int(self.data.splits[place.split].labels[place.index])
        return None if number == UNLABELLED else self.data.classes[number]

    @property
    def across(self) -> list[Match]:
        """The matches between two splits."""
        return [match for match in self.matches if match.one.split != match.other.split]

    @property
    def conflicts(self) -> list[Match]:
        """The matches with two labels."""
        return [match for match in self.matches if self.label(match.one) != self.label(match.other)]

    def leaked(self) -> dict[str, int]:
        """How many images of each split are in another one too."""
        counts = {
            split: len({end.index for match in self.across for end in (match.one, match.other) if end.split == split})
            for split in self.data.splits
        }
        return {split: count for split, count in counts.items() if count}

    def match_rows(self) -> list[Row]:
        """A row a pair."""
        return [
            {
                "file": self.file(match.one),
                "split": match.one.split,
                "class": self.label(match.one),
                "other_file": self.file(match.other),
                "other_split": match.other.split,
                "other_class": self.label(match.other),
                "pixels": round(match.pixels, 4),
                "similarity": None if match.similarity is None else round(match.similarity, 4),
                "mirrored": match.mirrored,
            }
            for match in self.matches
        ]

    def doubt_rows(self) -> list[Row]:
        """A row an image, the worst first."""
        rows: list[Row] = []
        for doubt in self.doubts or ():
            row: Row = {
                "file": self.file(doubt.place),
                "split": doubt.place.split,
                "given": self.data.classes[doubt.given],
                "suggested": self.data.classes[doubt.suggested],
                "score": round(doubt.score, 4),
                "given_share": round(doubt.given_share, 4),
                "suggested_share": round(doubt.suggested_share, 4),
                "probability": None if doubt.probability is None else round(doubt.probability, 4),
            }
            for number, place in enumerate(self.neighbours(doubt), start=1):
                row[f"neighbour_{number}"] = self.file(place)
            rows.append(row)
        return rows

    def neighbours(self, doubt: Doubt) -> list[Place]:
        """The nearest images that voted."""
        return [Place(split=self.voting, index=index) for index in doubt.neighbours]

    def confusions(self) -> list[tuple[str, str, int]]:
        """How often each class is given where another is suggested, most often first."""
        counts = Counter((doubt.given, doubt.suggested) for doubt in self.doubts or ())
        names = self.data.classes
        return [(names[given], names[suggested], count) for (given, suggested), count in counts.most_common()]

    def to_json(self) -> dict[str, object]:
        """All of it as plain data."""
        return {
            "place": self.data.place,
            "kind": self.data.kind,
            "images": {split: len(source) for split, source in self.data.splits.items()},
            "model": self.model,
            "within": self.within,
            "leaked": self.leaked(),
            "near_duplicates": self.match_rows(),
            "mislabelled": None if self.doubts is None else self.doubt_rows(),
        }


MATCH_COLUMNS = (
    *("file", "split", "class", "other_file", "other_split", "other_class"),
    *("pixels", "similarity", "mirrored"),
)
DOUBT_COLUMNS = (
    *("file", "split", "given", "suggested", "score", "given_share", "suggested_share", "probability"),
    *(f"neighbour_{number + 1}" for number in range(SHOWN_NEIGHBOURS)),
)
