"""Predictions held against what papers and public repositories measured: `python -m benchmarks.published --help`.

A source is a module that reads one kind of file into rows; a row has what was measured and how to predict it:

    rows.py         a row, a question, an answer
    flops.py        the work that sources divide by seconds
    machines.py     the clusters that were measured on
    planned.py      a model, a configuration and a cluster, planned by a planner by hand
    alike.py        deep pipelines, whose equal stages are planned once
    schedules.py    a schedule with given times, simulated
    megatron.py zero_bubble.py nanotron.py gpipe.py other.py      the sources
    sources.py      which source reads a file
    running.py      rows to results
    scores.py       errors, bias, Kendall's tau, regret, precision and recall
    report.py       tables, JSON and a plot
"""
