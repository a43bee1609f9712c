"""Messages of the Python interface as the command line prints them."""

from __future__ import annotations

import pytest

from autopar.tools.wording import on_command_line
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from passes.planners import Auto, allowed


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("microbatches=3: they must divide the batch", "3 microbatches: they must divide the batch"),
        ("leave microbatches= out", "leave --microbatches out"),
        ("with memory_limit=3,424,324 (bytes)", "with --memory-limit 3424324"),
        ("(memory_limit=444,446 bytes); a smaller", "(--memory-limit 444446); a smaller"),
        ("use planner=autopar.Auto(), which", "use --planner auto, which"),
        ("Megatron(data=3, tensor=2): this makes 6", "--planner megatron:3x2: this makes 6"),
        ("mesh={'data': 3, 'model': 2}: this makes 6", "--mesh data=3,model=2: this makes 6"),
        ("pins['up']='garbage': a placement", "--pin 'up=garbage': a placement"),
        ("pins['up']: no input", "--pin 'up': no input"),
        ('write, say, forbid={"all_to_all"}', "write, say, --forbid all_to_all"),
        ("Auto(forbid=['all_reduce', 'all_gather']): these", "--forbid all_reduce,all_gather: these"),
        ("name the batch with batch_argnums=", "name the batch with batch_argnums="),
    ],
)
def test_options_are_those_of_the_command_line(message: str, words: str):
    assert on_command_line(message) == words


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"mesh": {"data": 0}}, "--mesh data=0: a mesh is names of axes"),
        ({"forbid": ["gossip"]}, "--forbid gossip: "),
        ({"pipeline": True, "mesh": {"x": 2}}, "--planner stages with --mesh: "),
    ],
    ids=["mesh", "forbid", "stages"],
)
def test_planners_errors_are_in_the_command_lines_words(options: dict[str, object], option: str):
    with pytest.raises(PlanningError) as raised:
        Auto(**options)  # pyright: ignore[reportArgumentType]
    written = on_command_line(str(raised.value))
    assert written.startswith(option)
    assert "=" not in written.replace("data=0", "").replace("data=4,model=2", "")


def test_a_limit_is_in_the_command_lines_words():
    _, words = allowed(parse_cluster("8:h100"), 1024)
    assert on_command_line(words) == "--memory-limit 1024"
