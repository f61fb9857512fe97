"""Measurements of edgespec on this machine, beside other engines in the same run. `python -m edgespec_bench --help`."""
