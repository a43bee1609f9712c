"""Predictions beside what papers and public repositories measured: `python -m benchmarks.published --help`.

A source is a module that reads one kind of file into rows; a row has what was measured and how to predict it:

    rows.py         a row (one measurement), the question of how to predict it, its answer
    flops.py        the flops of a step as sources count them
    machines.py     the clusters of the sources
    planned.py      a model with a configuration and a cluster, planned by a hand-made planner
    alike.py        the hand-made planner of deep pipelines, which plans equal stages once
    schedules.py    a pipeline schedule simulated with times that a source gives
    megatron.py zero_bubble.py nanotron.py gpipe.py other.py    the sources
    megatron_gpt.py nanotron_llama.py gpipe_transformer.py      models as the sources' software computes them
    sources.py      the source that reads a file
    running.py      the results of rows
    scores.py       errors, bias, Kendall's tau, regret, precision and recall
    report.py       tables, JSON and a plot of results
"""
