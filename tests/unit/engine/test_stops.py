"""Stop strings across pieces; what was shown is never taken back."""

import random

import pytest

from workbench.engine.stops import StopMatcher


def stream(matcher, pieces):
    shown = [matcher.feed(p) for p in pieces]
    return "".join(t for t, _ in shown), [m for _, m in shown]


@pytest.mark.parametrize("pieces", [["ab", "cST", "OPde"], ["abcSTOPde"], list("abcSTOPde")])
@pytest.mark.parametrize(("include", "text"), [(False, "abc"), (True, "abcSTOP")])
def test_spd_09_a_stop_string_across_tokens(pieces, include, text):
    matcher = StopMatcher(("STOP",), include)
    out, matched = stream(matcher, pieces)
    assert out == text and matched[-1]
    assert matcher.matched == "STOP"
    assert matcher.feed("more") == ("", True) and matcher.flush() == ""


def test_spd_09_text_held_back_is_flushed_at_the_end():
    matcher = StopMatcher(("STOP",))
    assert stream(matcher, ["ab", "cST"]) == ("abc", [False, False])
    assert matcher.held == "ST"
    assert matcher.flush() == "ST" and matcher.flush() == ""


def test_only_the_longest_suffix_that_may_become_a_stop_is_held():
    matcher = StopMatcher(("aab", "xyz"))
    assert matcher.feed("xaaa") == ("xa", False)  # "aa" may become aab, "aaa" may not
    assert matcher.feed("xy") == ("aa", False)
    assert matcher.feed("b") == ("xyb", False)
    assert matcher.feed("plain") == ("plain", False)


def test_the_stop_that_ends_first_wins_and_the_longest_of_those():
    assert StopMatcher(("abcd", "bc")).feed("xabcd") == ("xa", True)
    matcher = StopMatcher(("c", "abc"))
    assert matcher.feed("xabc") == ("x", True) and matcher.matched == "abc"


def test_no_stops_pass_everything():
    matcher = StopMatcher()
    assert matcher.feed("text") == ("text", False) and matcher.flush() == ""


def test_a_copy_goes_its_own_way():
    one = StopMatcher(("STOP",))
    one.feed("aST")
    two = one.copy()
    assert two.feed("OP") == ("", True)
    assert one.feed("x") == ("STx", False) and one.matched is None


def reference(text, stops, include):
    """Character by character on the whole text."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            return text[: end if include else end - max(map(len, hits))]
    return text


@pytest.mark.parametrize("seed", range(300))
def test_any_cut_into_pieces_gives_the_same_text(seed):
    rng = random.Random(seed)
    stops = tuple(
        "".join(rng.choices("ab", k=rng.randint(1, 4))) + rng.choice("abc") for _ in range(rng.randint(1, 3))
    )
    text = "".join(rng.choices("abc", k=rng.randint(0, 16)))
    include = rng.random() < 0.5
    matcher = StopMatcher(stops, include)
    out, at = "", 0
    while at < len(text):
        size = rng.randint(1, 4)
        out += matcher.feed(text[at : at + size]).text
        at += size
        assert reference(text, stops, include).startswith(out)
        if matcher.matched is None:
            seen = text[:at]
            grows = [n for n in range(1, len(seen) + 1) if any(s.startswith(seen[-n:]) for s in stops)]
            assert len(seen) - len(out) == max(grows, default=0)
    assert out + matcher.flush() == reference(text, stops, include)
