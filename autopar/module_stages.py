"""Functions of modules compiled ahead of time: lowered and compiled programs that are called with the modules
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.frontend import Signature, modules


@dataclass(frozen=True, slots=True)
class OfModules:
    """A lowered or compiled program of arrays that takes and updates modules as the function itself does.

    All other attributes are the program's own.
    """

    _program: Any
    _library: modules.Library
    _signature: Signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dynamic, _ = self._signature.split(args, kwargs)
        with self._library.entered(dynamic) as (arrays, finish):
            args, kwargs = self._signature.merge(arrays, args, kwargs)
            return finish(self._program(*args, **kwargs))

    def compile(self, compiler_options: dict[str, Any] | None = None) -> OfModules:
        """The executable; `compiler_options` are XLA's."""
        return OfModules(self._program.compile(compiler_options), self._library, self._signature)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)
