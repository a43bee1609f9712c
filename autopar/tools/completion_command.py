"""`autopar completion`: a script by which a shell completes commands, options and files."""

from __future__ import annotations

import argparse

from autopar.tools.command import DONE, Command, Output
from autopar.tools.parsing import commands_of

SHELLS = ("bash", "zsh", "fish")

_HELP = """\
Print a script by which your shell completes commands and options; what is no
option is completed as a file."""

_MORE = """\
example:
  autopar completion bash > ~/.local/share/bash-completion/completions/autopar

zsh: autopar completion zsh > a folder of $fpath/_autopar
fish: autopar completion fish > ~/.config/fish/completions/autopar.fish

exit status: 0"""

_BASH = """\
_autopar() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; else
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  case $word in
    -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
    *) if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "$words" -- "$word"))
       else COMPREPLY=($(compgen -f -- "$word")); fi ;;
  esac
}}
complete -o filenames -F _autopar autopar
"""


def options_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The long options of every command of a parser."""
    return {
        name: sorted(o for action in each._actions for o in action.option_strings if o.startswith("--"))
        for name, each in commands_of(parser).items()
    }


def script(shell: str, options: dict[str, list[str]]) -> str:
    """The completion script of a shell."""
    if shell == "fish":
        names = " ".join(options)
        lines = [f'complete -c autopar -n __fish_use_subcommand -f -a "{names}"']
        for name, each in options.items():
            lines += [f'complete -c autopar -n "__fish_seen_subcommand_from {name}" -l {o[2:]}' for o in each]
        return "\n".join(lines) + "\n"
    cases = "\n".join(f'      {name}) words="{" ".join(each)}" ;;' for name, each in options.items())
    written = _BASH.format(commands=" ".join(options), cases=cases)
    if shell == "bash":
        return written
    return f"#compdef autopar\nautoload -U +X bashcompinit && bashcompinit\n{written}"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    return script(arguments.shell, options_of(arguments.parser)), DONE


COMMAND = Command(
    name="completion",
    summary="complete commands in your shell",
    description=_HELP,
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
