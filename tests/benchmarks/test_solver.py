"""The independent evaluator of contest instances on an instance worked out by hand, and the command line on it."""

import gzip
import json

import pytest

from benchmarks.solver import FORBIDDEN, evaluate, main

INSTANCE = {
    "name": "by hand",
    "nodes": {
        "intervals": [[0, 2], [1, 3], []],
        "costs": [[5, 0], [7, FORBIDDEN], [1, 2]],
        "usages": [[1, 10], [1, 1], [50, 50]],
    },
    "edges": {"nodes": [[0, 1], [2, 0]], "costs": [[3, 0, 4, 0], [0, 9, FORBIDDEN, 0]]},
    "usage_limit": 10,
}


@pytest.mark.parametrize(
    ("choice", "cost", "complaint"),
    [
        ((0, 0, 0), 5 + 7 + 1 + 3 + 0, ""),
        ((1, 0, 1), 0 + 7 + 2 + 4 + 0, "11 in use at time 1, limit 10"),
        ((0, 0, 1), 5 + 7 + 2 + 3 + FORBIDDEN, "forbidden"),
        ((0, 1, 0), 5 + FORBIDDEN + 1 + 0 + 0, "forbidden"),
        ((0, 2, 0), 0, "node 1 takes strategy 2 of 2"),
        ((0, 0), 0, "2 strategies for 3 nodes"),
    ],
)
def test_the_evaluator_reads_the_format(choice, cost, complaint):
    found, error = evaluate(INSTANCE, choice)
    assert found == cost
    assert complaint in error
    assert bool(complaint) == bool(error)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_the_command_line_solves_what_it_finds(tmp_path, capsys, suffix):
    text = json.dumps({"problem": INSTANCE}).encode()
    (tmp_path / f"contest-X{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    saved = tmp_path / "answers"
    arguments = ["--data", str(tmp_path), "--instances", "X", "--seconds", "5", "--json", "--save", str(saved)]
    assert main(arguments) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["cost"] == 16
    assert result["bound"] == pytest.approx(16)
    assert result["feasible"]
    assert result["best"] is None
    assert json.loads((saved / "X.json").read_text()) == [0, 0, 0]


def test_an_instance_that_cannot_fit_is_a_miss(tmp_path, capsys):
    (tmp_path / "X.json").write_text(json.dumps({"problem": INSTANCE | {"usage_limit": 1}}))
    assert main(["--data", str(tmp_path), "--seconds", "5", "--json"]) == 1
    assert "no feasible answer" in json.loads(capsys.readouterr().out)["misses"][0]


def test_an_unknown_instance_says_what_there_is(tmp_path):
    (tmp_path / "X.json").write_text(json.dumps({"problem": INSTANCE}))
    with pytest.raises(SystemExit, match="which has X"):
        main(["--data", str(tmp_path), "--instances", "Y"])
