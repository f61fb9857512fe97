"""The evidence for losslessness, shipped so that users can run it: see `edgespec check`.

`rules` enumerates the acceptance rules exactly, `faults` holds broken rules that the same test must catch, `goodness`
tests emitted tokens against their distributions, `pair` puts them together for a user's own target and draft.
"""
