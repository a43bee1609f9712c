"""The targets of the command line: the step and its arguments that a `MODULE:FUNCTION` of the user's returns."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from autopar.errors import explain
from autopar.tools.fit import Example
from autopar.tools.largest import presets_of
from passes.errors import PlanningError, close
from passes.text import count

TARGET = """\
FUNCTION takes no arguments and returns (step, args) or (step, args, kwargs):
step is the train step, plain or under @autopar.parallelize; args are what it
is called with, arrays or jax.ShapeDtypeStructs: only shapes and dtypes count.

  # train.py
  def example():
      state = jax.eval_shape(make_state)
      batch = jax.ShapeDtypeStruct((64, 1024), "int32")
      return train_step, (state, batch)

MODULE is imported from the current folder, on the CPU."""

_OTHERS = (
    *(f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("autopar", "passes")),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")),
    "<frozen ",
)
"""The beginnings of the paths of autopar's and of Python's files."""

_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/]")


class UsageError(Exception):
    """A command that cannot be carried out as written; the message says what to write instead."""


def example(target: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The step and its arguments that `MODULE:FUNCTION` returns. Raises UsageError where it does not."""
    return _read(target, called(target))


def _read(target: str, returned: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The step and its arguments in what a target returned. Raises UsageError for anything else."""
    match returned:
        case (step, tuple() | list() as args) if callable(step):
            return _checked(target, step, tuple(args), {})
        case (step, tuple() | list() as args, dict(kwargs)) if callable(step):
            return _checked(target, step, tuple(args), kwargs)
        case (step, first, *more) if callable(step) and not isinstance(first, tuple | list):
            given = ", ".join(type(value).__name__ for value in (first, *more))
            rule = f"it returned a step and {given}, and the step's arguments are a tuple, also where there is but one"
            raise UsageError(explain(target, rule, "", f"return (step, ({'state, batch' if more else 'batch,'}))"))
        case other:
            raise UsageError(f"{target} returned {type(other).__name__}, not a step and its arguments\n{TARGET}")


def _checked(
    target: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A step and its arguments. Raises UsageError for others than the step takes."""
    with suppress(ValueError):  # a callable that does not say what it takes
        signature = inspect.signature(step)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            given, taken = count(len(args) + len(kwargs), "argument"), ", ".join(signature.parameters) or "nothing"
            rule = f"it returned {given} for a step that takes {taken}: {error}"
            remedy = "return (step, args), where args are a tuple of what the step is called with"
            raise UsageError(explain(target, rule, "", remedy)) from error
    return step, args, kwargs


def called(target: str) -> Any:
    """The result of calling `MODULE:FUNCTION`. Raises UsageError where there is no such function, or it fails."""
    module_name, _, name = target.partition(":")
    if module_name.endswith(".py"):
        remedy = f"write {'.'.join(Path(module_name).with_suffix('').parts)}:{name or 'FUNCTION'}"
        raise UsageError(explain(target, "that is a file, and MODULE is what Python imports", "", remedy))
    if not name or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"{target!r} is not MODULE:FUNCTION\n{TARGET}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
        if callable(function := getattr(module, name, None)):
            return function()
    except PlanningError as error:  # of a call in the user's own code, whose words are Python's
        usage = UsageError(str(error))
        usage.__notes__ = getattr(error, "__notes__", [])
        raise usage from error
    except SystemExit as end:  # it read this command's line as its own, say
        rule = f"the module or the function ends the program (SystemExit: {end.code})"
        remedy = 'put what a script does, such as reading its options, under if __name__ == "__main__":'
        raise UsageError(explain(target, rule, "", remedy)) from end
    except Exception as error:  # of whatever kind: it is the user's own code
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            rule = f"there is no module {error.name!r} here ({os.getcwd()}) or among those installed"
            raise UsageError(rule) from error
        raise UsageError(f"{target} raised an error\n{_users_traceback(error, module_name)}") from error
    others = [other for other, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
    guess = close(name, others) or (f"it has {', '.join(others[:10])}" if others else "")
    raise UsageError("\n  ".join(filter(None, (f"{module_name} ({module.__file__}) has no function {name!r}", guess))))


def _users_traceback(error: Exception, module: str) -> str:
    """The traceback of an error from the user's own code on."""
    frames = users_frames(error, module)
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def users_frames(error: BaseException, module: str = "") -> TracebackType | None:
    """The traceback of an error from the first frame of the user's own code on; None where it has none.

    That is what is neither autopar's nor a library's, or of the same package as the `module` of the target.
    """
    frames = error.__traceback__
    package = module.partition(".")[0]
    while frames and not _is_users(frames.tb_frame.f_code.co_filename):
        if package and frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package:
            break
        frames = frames.tb_next
    return frames


def _is_users(path: str) -> bool:
    """Whether a file may be the user's: neither autopar's, nor Python's, nor of a package that was installed."""
    return not path.startswith(_OTHERS) and _INSTALLED.search(path) is None


def presets(target: str, named: str | None) -> dict[str, Callable[[], Example]]:
    """The presets that `named` returns; by default those of the `target`'s module, if it has any. Raises UsageError."""
    source = named or f"{target.partition(':')[0]}:presets"
    module, name = source.partition(":")[::2]
    if not named and not callable(getattr(sys.modules.get(module), name, None)):
        return {}
    match called(source):
        case dict() as examples:
            return presets_of(examples, lambda value: Example.of(*_read(source, value)))
        case other:
            rule = f"it returned {type(other).__name__}, and presets are a dict of examples by name, smallest first"
            raise UsageError(explain(f"--presets {source}", rule, "", "return {name: (step, args)}"))
