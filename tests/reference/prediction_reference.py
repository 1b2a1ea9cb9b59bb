"""The cursor in a predicted text, from its definition. Shares nothing with the core."""

from __future__ import annotations

RESYNC, LONGEST = 3, 32


class Cursor:
    """`following` is what the prediction says comes next; [] where it says nothing."""

    def __init__(self, prediction: list[int]) -> None:
        self.prediction = prediction
        self.output: list[int] = []
        self.at = 0
        self.lost = False

    @property
    def following(self) -> list[int]:
        return [] if self.lost else self.prediction[self.at :]

    def take(self, token: int) -> None:
        self.output.append(token)
        if not self.lost and self.at < len(self.prediction) and self.prediction[self.at] == token:
            self.at += 1
            return
        self.lost = True
        places = {end: self._agreement(end) for end in range(1, len(self.prediction) + 1)}
        longest = max(places.values(), default=0)
        if longest < RESYNC:
            return
        ends = [end for end, count in places.items() if count == longest]
        self.at = next((end for end in ends if end > self.at), ends[0])
        self.lost = False

    def _agreement(self, end: int) -> int:
        """Tokens in front of `end` that are the last of the output, LONGEST at most."""
        count = 0
        while (
            count < min(LONGEST, end, len(self.output))
            and self.prediction[end - count - 1] == self.output[-count - 1]
        ):
            count += 1
        return count
