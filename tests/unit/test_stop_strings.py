"""Stop strings: any cut of the text finds what a plain search finds; none is held needlessly."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_ext.text.stop_strings import StopStrings


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Independent definition: the smallest end; of several, the longest stop."""
    ends = [
        (i + len(stop), -len(stop), stop)
        for stop in stops
        for i in range(len(text))
        if text.startswith(stop, i)
    ]
    if not ends:
        return None
    end, _, stop = min(ends)
    return end, stop


def longest_open_prefix(text: str, stops: list[str]) -> int:
    return max(
        (k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k]) or k == 0),
        default=0,
    )


pieces_strategy = st.lists(st.text(alphabet="ab", max_size=5), max_size=12)
stops_strategy = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500)
@given(pieces_strategy, stops_strategy)
def test_equals_plain_search(pieces: list[str], stops: list[str]) -> None:
    checker = StopStrings(stops)
    seen = ""
    expected = first_stop("".join(pieces), stops)
    for piece in pieces:
        found = checker.feed(piece)
        if found is not None:
            end, stop = found
            assert expected == (len(seen) + end, stop)
            return
        seen += piece
        assert checker.held_chars == longest_open_prefix(seen, stops)
    assert expected is None


@given(st.text(alphabet="ab", max_size=30), st.text(alphabet="ab", min_size=1, max_size=4),
       st.integers(0, 30))  # fmt: skip
def test_stops_before_the_minimum_are_passed_over(text: str, stop: str, allowed_from: int) -> None:
    checker = StopStrings([stop])
    ends = [i + len(stop) for i in range(len(text)) if text.startswith(stop, i)]
    expected = next((end for end in ends if end - 1 >= allowed_from), None)
    got = None
    for i, char in enumerate(text):
        if checker.feed(char, may_stop=i >= allowed_from) is not None:
            got = i + 1
            break
    assert got == expected


def test_no_stops_hold_nothing() -> None:
    checker = StopStrings([])
    assert checker.feed("abc") is None
    assert checker.held_chars == 0


def test_a_stop_over_many_pieces() -> None:
    checker = StopStrings(["\n\nUser:"])
    for piece in ("Hello", "\n", "\nUs", "er"):
        assert checker.feed(piece) is None
    assert checker.held_chars == len("\n\nUser")
    assert checker.feed(": more") == (1, "\n\nUser:")
