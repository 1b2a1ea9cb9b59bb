"""The cursor in a predicted text, the edits that it learns, and how many of its drafts are worth
their rows, from their definitions. Shares nothing with the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

RESYNC, LONGEST = 3, 32
LONGEST_EDIT, MOST_EDITS, MOST_TRUST = 8, 16, 3
MOST_DRAFTS = 64


class Cursor:
    """`following` is what the prediction says comes next, 64 tokens at most; [] where it says
    nothing.

    `guessed` is the same, and where the cursor is lost what follows the longest match that is too
    short to set it; `match` is how many tokens agree there, `agreement` what that counts for: an
    output that has always been as predicted has a long match. `edits` are the tokens of the
    prediction that became others, what they became, and the trust in that.
    """

    def __init__(self, prediction: list[int]) -> None:
        self.prediction = prediction
        self.output: list[int] = []
        self.at = 0
        self.guess = 0
        self.match = 0
        self.lost = False
        self.whole = True  # it was never lost
        self.left = 0  # lost: how long the output was when it was still as predicted
        self.edits: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        self.inside: tuple[tuple[int, ...], int] | None = None  # an edit, tokens written of it
        self.repeated = self.refuted = 0  # edits that came again, and that did not

    @property
    def agreement(self) -> int:
        return max(self.match, 10) if self.whole else self.match

    @property
    def following(self) -> list[int]:
        return [] if self.lost else self._ahead(self.at)

    @property
    def guessed(self) -> list[int]:
        if not self.lost:
            return self.following
        return self._ahead(self.guess) if self.match else []

    @property
    def edited(self) -> list[int]:
        """`following` where an edit is part of it, else []."""
        before, following = self.edits, self.following
        if self.inside is not None:
            return following
        self.edits = {}
        unedited, self.edits = self.following, before
        return [] if unedited == following else following

    def _ahead(self, at: int) -> list[int]:
        tokens: list[int] = []
        if self.inside is not None:
            before, written = self.inside
            tokens, at = list(self.edits[before][0][written:]), at + len(before)
        while at < len(self.prediction):
            edit = self._edit_at(at)
            tokens += self.edits[edit][0] if edit else self.prediction[at : at + 1]
            at += len(edit) if edit else 1
        return tokens[:MOST_DRAFTS]

    def _edit_at(self, at: int) -> tuple[int, ...]:
        """The longest trusted edit of what stands there; (): none."""
        fitting = [
            before for before, (_, trust) in self.edits.items()
            if trust > 0 and list(before) == self.prediction[at : at + len(before)]
        ]  # fmt: skip
        return max(fitting, key=len, default=())

    def _trust(self, edit: tuple[int, ...], change: int) -> None:
        after, trust = self.edits[edit]
        self.edits[edit] = (after, min(trust + change, MOST_TRUST))

    def take(self, token: int) -> None:
        self.output.append(token)
        if not self.lost:
            edit, written = self.inside or (self._edit_at(self.at), 0)
            was_inside, self.inside = self.inside is not None, None
            if edit and self.edits[edit][0][written] == token:
                self.match += 1
                if written + 1 < len(self.edits[edit][0]):
                    self.inside = (edit, written + 1)
                else:
                    self.at += len(edit)
                    self._trust(edit, 1)
                    self.repeated += 1
                return
            if edit:
                self._trust(edit, -1)
                self.refuted += 1
            if not was_inside and self.prediction[self.at : self.at + 1] == [token]:
                self.at += 1
                self.match += 1
                return
            self.left = len(self.output) - 1 - written
            self.whole = False
        places = {end: self._agreement(end) for end in range(1, len(self.prediction) + 1)}
        self.match = max(places.values(), default=0)
        ends = [end for end, count in places.items() if count == self.match]
        place = next((end for end in ends if end > self.at), ends[0]) if self.match else 0
        self.lost = self.match < RESYNC
        if self.lost:
            self.guess = place
            return
        self._learn(place)
        self.at = place

    def _learn(self, place: int) -> None:
        """Back in the prediction, behind `place` tokens of it: what came in between is an edit."""
        agree = min(self.match, len(self.output) - self.left)
        before = self.prediction[self.at : place - agree]
        after = self.output[self.left : len(self.output) - agree]
        if self.left == 0 or place - agree < self.at:
            return
        if not before or not after:  # then it is one of the token behind it, too
            anchor = self.prediction[place - agree]
            before, after = [*before, anchor], [*after, anchor]
        if max(len(before), len(after)) > LONGEST_EDIT:
            return
        self.edits.pop(tuple(before), None)
        if len(self.edits) == MOST_EDITS:
            del self.edits[next(iter(self.edits))]
        self.edits[tuple(before)] = (tuple(after), 1)

    def _agreement(self, end: int) -> int:
        """Tokens in front of `end` that are the last of the output, LONGEST at most."""
        count = 0
        while (
            count < min(LONGEST, end, len(self.output))
            and self.prediction[end - count - 1] == self.output[-count - 1]
        ):
            count += 1
        return count


# The longest match of each class, and the chance of a draft behind it before anything was seen.
CLASSES = ((1, 0.35), (2, 0.55), (3, 0.60), (5, 0.75), (9, 0.85), (10**9, 0.94))
PRIOR = 4.0  # as many drafts as what is known before counts
# How much a draft counts less with each one after it: for its own request, there behind a match of
# ten and more, for all requests.
OWN, OWN_LONG, ALL = 0.95, 0.98, 0.99


class Chances:
    """How often drafts of a prediction are right, by the tokens that agree in front of them: those
    of one request over those of all, and both over what is taken for it."""

    def __init__(self) -> None:
        self._seen = [[[0.0, 0.0] for _ in CLASSES] for _ in range(2)]

    def _class_of(self, match: int) -> int:
        return next(i for i, (most, _) in enumerate(CLASSES) if match <= most)

    def of(self, match: int) -> float:
        number = self._class_of(match)
        chance = CLASSES[number][1]
        for seen in self._seen:
            right, tried = seen[number]
            chance = (right + PRIOR * chance) / (tried + PRIOR)
        return chance

    def survival(self, match: int, length: int) -> list[float]:
        """[length] that a draft and all in front of it are right."""
        alive, result = 1.0, []
        for i in range(length):
            alive *= self.of(match + i)
            result.append(alive)
        return result

    def observe(self, match: int, drafts: Sequence[int], decided: Sequence[int]) -> None:
        """`drafts` followed a match of so many tokens; `decided` is what came."""
        for i, (draft, token) in enumerate(zip(drafts, decided, strict=False)):
            own = OWN_LONG if match + i >= 10 else OWN
            for seen, decay in zip(self._seen, (ALL, own), strict=True):
                count = seen[self._class_of(match + i)]
                count[0] = count[0] * decay + (draft == token)
                count[1] = count[1] * decay + 1.0
            if draft != token:
                return


def worth(survival: Sequence[float], seconds: Callable[[int], float]) -> int:
    """How many of the drafts bring most tokens per second; 0 where none makes a step 2 % faster."""
    plain = best = 1.0 / seconds(1)
    tokens, count = 1.0, 0
    for i, chance in enumerate(survival):
        tokens += chance
        if tokens / seconds(2 + i) > best:
            best, count = tokens / seconds(2 + i), i + 1
    return count if best >= 1.02 * plain else 0
