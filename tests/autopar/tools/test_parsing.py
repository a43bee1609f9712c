"""Commands and options: guesses at what is none, help by topic, and completion in shells."""

import shutil
import subprocess

import pytest

from autopar.tools.cli import main, parser
from autopar.tools.parsing import commands_of
from tests.autopar.tools.train_module import PLAN

COMMANDS = commands_of(parser())


@pytest.mark.parametrize(
    ("topics", "words"),
    [
        (["targets"], "MODULE"),
        (["clusters"], "8:h100"),
        (["planners"], "megatron"),
        ([], "explain   say why a plan is as it is"),
        (["diff"], "usage: autopar diff"),
    ],
)
def test_help_tells_of_topics_at_length(capsys, topics, words):
    assert main(["help", *topics]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "guess"),
    [
        (["plna", "train:example"], "did you mean 'plan'"),
        (
            ["show", PLAN, "--operatrs"],
            "autopar show: error: unrecognized arguments: --operatrs\n  did you mean '--operators",
        ),
        (["export", PLAN, "--format", "sharding", "-o", "x.py"], "did you mean 'shardings'"),
        (["fit", "train:example", "--cluster", "8:h100", "--memory-limt=2GB"], "did you mean '--memory-limit'"),
    ],
)
def test_a_command_or_option_that_is_none_is_guessed(capsys, command, guess):
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert guess in capsys.readouterr().err


def test_a_topic_that_is_none_is_guessed(capsys):
    assert main(["help", "clustres"]) == 2
    assert "did you mean 'clusters'" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_files(capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "autopar.sh").write_text(capsys.readouterr().out)
    (tmp_path / "plan.json").write_text("")

    def completed(*words):
        line = " ".join(f"'{word}'" for word in words)
        script = (
            f"source autopar.sh; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _autopar; echo ${{COMPREPLY[@]}}"
        )
        return subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True).stdout.split()

    assert completed("autopar", "re") == ["report"]
    assert completed("autopar", "report", "--o") == ["--out"]
    assert completed("autopar", "report", "pl") == ["plan.json"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_every_command_and_option(capsys, shell):
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    assert "alternatives" in out
