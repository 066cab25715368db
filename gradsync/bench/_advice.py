"""The advice of a report: what `_suggest.py` has found, in sentences."""

from gradsync.bench._suggest import Gain, Longer, Share, Suggestion
from gradsync.bench._text import place, scale
from gradsync.bench._ways import WAYS
from gradsync.bench._window_cost import TARGET

WORTH = 0.95
"""A remedy is worth its price if it takes at most this share of the time without it."""


def advice(suggestion: Suggestion) -> str:
    """Tell how much time synchronisation takes in this place, how long windows should be, and which remedy to use."""
    shares = ";\n    ".join(map(_share, suggestion.shares))
    what = f"{place(suggestion)}: in `{WAYS[suggestion.way].title}`, synchronisation takes"
    separator = "\n    " if len(suggestion.shares) > 1 else " "
    lines = [
        f"{what}{separator}{shares}.",
        _windows(suggestion.shares[-1], suggestion.enough),
        *_unclear(suggestion.shares),
        *(_gain(gain, WAYS[suggestion.way].title) for gain in suggestion.gains),
    ]
    return "\n".join(lines)


def _share(share: Share) -> str:
    number, unit = scale([share.compute])
    low, high = share.quartiles
    baseline = "" if share.baseline is None else f"; {share.baseline:.0%} where every backward synchronises"
    times = f"{number(share.seconds)} {unit}, of which {number(share.compute)} are computing"
    if share.seconds <= share.compute:
        times = f"{number(share.seconds)} {unit} is no more than the {number(share.compute)} of computing alone"
    return (
        f"{share.share:.0%} of the time in windows of {share.steps}: {times} "
        f"(quartiles {low:.0%} to {high:.0%}{baseline})"
    )


def _windows(longest: Share, enough: Longer | None) -> str:
    target = f"{TARGET:.0%}"
    if enough is None:
        return (
            f"A share that comes back over {target} in longer windows is noise, so this run cannot tell how long "
            "windows should be: measure for longer (--seconds)."
        )
    if enough.estimated:
        number, unit = scale([longest.compute / longest.steps])
        return (
            f"Windows of about {enough.steps} would bring it under {target}, if a window still costs "
            f"{number(longest.seconds - longest.compute)} {unit} beyond computing there and a micro-batch "
            f"{number(longest.compute / longest.steps)} {unit}. The effective batch would grow from "
            f"{longest.effective_batch} to {enough.effective_batch}: mind the learning rate."
        )
    if enough.steps == longest.steps:
        return f"That is under {target} in windows of {enough.steps} (effective batch {enough.effective_batch})."
    return (
        f"Of the windows measured, those of {enough.steps} are the shortest under {target} "
        f"(effective batch {enough.effective_batch})."
    )


def _unclear(shares: list[Share]) -> list[str]:
    """Name the window lengths whose share may also be on the other side of the target."""
    unclear = [str(share.steps) for share in shares if share.quartiles[0] < TARGET <= share.quartiles[1]]
    if not unclear:
        return []
    where = f"In windows of {' and '.join(unclear)} the quartiles lie on both sides of {TARGET:.0%}"
    return [f"{where}: measure for longer (--seconds) before you rely on it."]


def _gain(gain: Gain, way: str) -> str:
    number, unit = scale([gain.seconds])
    times = f"{number(gain.seconds)} {unit}, {gain.ratio:.2f} of the {number(gain.instead_of)} of `{way}`"
    if gain.clear and gain.ratio <= WORTH:
        return f"Write `{gain.written}`: an optimizer step here then takes {times}, and {gain.price}."
    if gain.ratio <= WORTH:
        return (
            f"Whether a remedy is worth its price in windows of {gain.steps}, this run cannot tell: `{gain.written}` "
            f"takes {times}, but the quartiles of the two overlap. Measure for longer (--seconds)."
        )
    return f"No remedy is worth its price in windows of {gain.steps}: the best, `{gain.written}`, takes {times}."
