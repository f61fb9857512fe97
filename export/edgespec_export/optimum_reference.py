"""Run as a program by the Python that has transformers: the logits of one text, by the model in a Hugging Face folder.

Imports nothing of edgespec, which that Python need not have. Usage: optimum_reference.py FOLDER IDS.json LOGITS.npy
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

__all__ = ["main"]


def main(folder: str, ids_path: str, logits_path: str) -> None:
    """Write [n, n_vocab] float32 logits of one pass over the ids, without a cache."""
    sys.path.pop(0)  # this file's own folder, where other modules have the names of packages
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    ids = json.loads(Path(ids_path).read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    np.save(logits_path, logits.float().numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
