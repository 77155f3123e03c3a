"""Predict, offline and without hardware, what a launch of the image measures; write it down as reference values.

Bytes in, values out: nothing here reads a clock, the environment or the network, and no path, owner or time of a file
enters a result. `plan` reads what to measure, `predict` computes, `report` says in words where each value comes from
and what it covers, and the whole is written as reference-values.toml.
"""
