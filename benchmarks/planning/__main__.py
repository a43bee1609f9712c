"""The time of planning: of one model by its phases, of large models by `cases`, and how it grows.

python -m benchmarks.planning --help
python -m benchmarks.planning cases --help
python -m benchmarks.planning growth --help
"""

import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.planning import cases, growth, phases

TABLES: Mapping[str, Callable[[Sequence[str]], int]] = {"cases": cases.main, "growth": growth.main}


def main(argv: Sequence[str]) -> int:
    """Prints the table that the first word names, by default the phases of one model; 1 if a target is missed."""
    return TABLES[argv[0]](argv[1:]) if argv and argv[0] in TABLES else phases.main(argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
