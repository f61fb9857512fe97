"""Training drafts for a target: corpus, features, torch cores, zoo folders with card and plots.

Imported by `edgespec train` only. torch is needed by the cores and the training loop alone; corpus and features are
made by edgespec's own runtime.
"""
