"""The command line: `python -m autopar` is `autopar`."""

import runpy

runpy.run_module("autopar.tools.cli", run_name="__main__", alter_sys=True)
