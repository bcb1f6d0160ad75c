"""The numbers of the README's tables are those of the stored rows."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()
SHAPE = re.compile(r"(\d+)×(\d+), (\d+)(?:, (\d+)×\4)?$")


def stored(name):
    with (ROOT / "benchmarks" / "results" / name).open() as file:
        return list(csv.DictReader(file))


def cells(after, page=README):
    """The rows of the table whose header begins with `after`."""
    lines = page[page.index(f"| {after}") :].splitlines()
    for line in lines[2:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("| ").split("|")]


def is_rounded(text, value):
    """Whether `text` is the number, perhaps rounded twice on the way."""
    digits = len(text.partition(".")[2])
    return abs(float(text) - float(value)) <= 0.5 * 10**-digits


def is_part(text, ratio):
    """Whether `1/n` is the ratio, n a whole number."""
    return abs(int(text.removeprefix("1/")) - 1 / float(ratio)) <= 0.5


def found(subject, shape, contenders):
    """The stored row of one of the contenders at a shape as the README has it: the fastest of them."""
    height, width, channels, window = SHAPE.match(shape).groups()
    rows = [
        row
        for row in stored("ops-h200.csv")
        if row["subject"] == subject and row["status"] == "ok" and row["contender"] in contenders
        if (row["height"], row["width"], row["channels"]) == (height, width, channels)
        if window is None or row["window"] == window
    ]
    return min(rows, key=lambda row: float(row["total_ms"])) if rows else None


def check_row(subject, shape, ours, peers, floor=None):
    mine = found(subject, shape, ["nearsight triton"])
    assert is_rounded(ours, mine["total_ms"]), (shape, mine["total_ms"])
    if floor is not None:
        assert is_rounded(floor, mine["total_over_floor"]), (shape, mine["total_over_floor"])
    for names, time, ratio in peers:
        row = found(subject, shape, names)
        if time == "refuses":
            assert row is None
            continue
        assert is_rounded(time, row["total_ms"]), (shape, row["contender"], row["total_ms"])
        same = is_part if ratio.startswith("1/") else is_rounded
        assert same(ratio, row["ours_over_this_total"]), (shape, row["contender"], row["ours_over_this_total"])


def test_local_attention():
    rows = list(cells("local attention: map"))
    assert len(rows) == 4
    for shape, ours, *rest in rows:
        names = (["conv 3x3"], ["unfold"], ["FlexAttention + positions"])
        check_row("local_attention", shape, ours, zip(names, rest[::2], rest[1::2], strict=True))


def test_qna_and_explicit_attention():
    rows = list(cells("QnA: map"))
    assert len(rows) == 4
    for shape, ours, time, ratio, _, other, its, floor, dense, over in rows:
        check_row("qna", shape, ours, [(["depthwise conv"], time, ratio)])
        check_row("explicit_attention", other, its, [(["dense map", "dense map, compiled"], dense, over)], floor=floor)


def test_the_commit_and_date():
    for name, of in (("ops-h200.csv", r"everybody in one run \(([\d-]+), commit (\w+)"), ("models-h200.csv", None)):
        rows = stored(name)
        assert len({(row["date"], row["commit"]) for row in rows}) == 1
        assert rows[0]["commit"] in README
        if of is not None:
            assert re.search(of, README).groups() == (rows[0]["date"], rows[0]["commit"])


@pytest.mark.parametrize("network", ["sasa_resnet50_convstem", "sasa_resnet50", "expatt_resnet50", "qna_vit_tiny"])
def test_networks(network):
    """As graphs (launched one by one) of the peer's images/s, and of its memory."""
    row = next(row for row in stored("models-h200.csv") if row["network"] == network)
    line = README[README.index("- Training images/s") :]
    said = re.search(rf"`{network}` ([\d.]+) \(([\d.]+)\)(?: of \w+)?,(?: with)? ([\d.]+\d)", line)
    wanted = (row["replayed_over_peer"], row["compiled_over_peer"], row["bytes_over_peer"])
    assert all(is_rounded(text, value) for text, value in zip(said.groups(), wanted, strict=True)), (said, wanted)


def test_layers():
    """Each layer beside the first of its peers, all of the file's shapes."""
    rows = stored("layers-h200.csv")
    assert f"({rows[0]['date']}, commit\n{rows[0]['commit']}" in BENCHMARKS
    ours = [row for row in rows if row["ours"] == "True"]
    written = list(cells("layer | map", BENCHMARKS))
    assert len(written) == len(ours)
    for (name, sizes, time, peer, ratio), row in zip(written, ours, strict=True):
        other = next(r for r in rows if (r["subject"], r["shape"]) == (row["subject"], row["shape"]) and r is not row)
        *told, window = SHAPE.match(sizes).groups()
        assert name == f"`{row['subject']}`"
        assert told == [row["height"], row["width"], row["channels"]]
        assert window in (None, row["window"])
        assert peer.rpartition(" ")[0] == other["contender"]
        assert is_rounded(time, row["total_ms"])
        assert is_rounded(peer.rpartition(" ")[2], other["total_ms"])
        assert is_rounded(ratio, other["ours_over_this_total"])
