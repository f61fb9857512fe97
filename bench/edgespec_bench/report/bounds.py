"""What bounds a figure: a sentence or two from the profile of a round, for the targets that were missed.

A round is a call of the target on several rows, the draft, and the host's work. Knows the figures, not the targets.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec_bench.report.figures import EDGESPEC, Figures

__all__ = ["bandwidth_bound", "plain_bound", "round_bound", "rows_bound"]


def plain_bound(figures: Figures) -> str:
    """Where the time of a one-row step goes."""
    model = figures.card.get("model", "")
    parts = figures.profile(model).get(1)
    return "" if not parts else f"a one-row call of {model}: {_shares(parts)}"


def rows_bound(figures: Figures, model: str) -> str:
    """What the rows beyond the first cost, by part."""
    profile = figures.profile(model)
    if not {1, 5} <= profile.keys():
        return ""
    more = {part: profile[5][part] - profile[1].get(part, 0.0) for part in profile[5]}
    added = sum(more.values())
    if added <= 0:
        return ""
    largest = sorted(more, key=lambda part: -more[part])[:3]
    listed = ", ".join(f"{part} {more[part]:.2f}" for part in largest)
    share = sum(more.get(part, 0.0) for part in figures.products(model)) / added
    gops = figures.gops(model).get(5)
    rate = f", which compute {gops:.0f} GOPS at five rows" if gops else ""
    return f"four further rows cost {added:.2f} ms more: {listed}; {share:.0%} of it in matrix products{rate}"


def bandwidth_bound(figures: Figures, read_bytes: float, gb_s: float) -> str:
    """How near the matrix products come to the bandwidth, and what the rest of a call takes."""
    model = figures.card.get("model", "")
    parts = figures.profile(model).get(1)
    if not parts:
        return ""
    products = sum(parts.get(part, 0.0) for part in figures.products(model))
    whole = sum(parts.values())
    if products <= 0:
        return ""
    reached = read_bytes / 1e6 / products
    return (
        f"matrix products take {products:.2f} of {whole:.2f} ms and read their weights at {reached:.1f} of "
        f"{gb_s:.1f} GB/s; were everything else free, the ratio would be {reached / gb_s:.2f}"
    )


def round_bound(figures: Figures, part: str, side: str | None, kinds: Sequence[str], setting: str) -> str:
    """Of the best speculative side: tokens a round, what a round takes, and what would be left if it were free."""
    if side is None:
        return ""
    length, times = figures.tokens_a_round(part, side, kinds, setting), figures.round_ms(part, side, kinds, setting)
    plain = figures.native(part)
    step = figures.round_ms(part, plain, kinds, setting) if plain else {}
    if length is None or not times or not step or not side.startswith(EDGESPEC):
        return ""
    whole = times["seconds"]
    parts = ", ".join(f"{name.removesuffix('_s')} {ms:.2f}" for name, ms in times.items() if name != "seconds")
    text = (
        f"{side}: {length:.2f} tokens a round of {whole:.2f} ms ({whole / step['seconds']:.2f} plain steps): {parts}; "
        f"rounds as cheap as a plain step would give {length:.2f}x of plain"
    )
    shares = figures.acceptance(part, side, kinds, setting)
    if shares:
        text += "; accepted by position " + ", ".join(f"{share:.2f}" for share in shares[:6])
    return text


def _shares(parts: dict[str, float]) -> str:
    whole = sum(parts.values())
    return ", ".join(f"{part} {ms:.2f} ms ({ms / whole:.0%})" for part, ms in parts.items())
