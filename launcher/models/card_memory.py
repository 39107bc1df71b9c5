"""How much of a GPU goes to the KV cache: arithmetic, and the words when it is too little. Pure.

::

    share of the card   utilization x total
    - in use            by everybody: other programs, this rank's weights and context, the other ranks' on this card
    - peak              what a step of the largest batch takes beyond that, for each rank on this card
    = room, split evenly among the ranks on this card

It is taken when every rank on the card has loaded its weights and no step is running.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.host.card_holders import Holder

_GIB = 1 << 30


class Card(NamedTuple):
    """One rank's view of its card; bytes."""

    total: int
    in_use: int
    """By everybody, this rank included."""
    own: int
    """Of `in_use`: this rank's weights."""
    peak: int
    """What a step of the largest batch takes beyond `in_use`."""
    ranks: int = 1
    """Ranks of ours on this card, this one included."""


def kv_room(card: Card, utilization: float) -> int:
    """Bytes of KV cache for this rank; below zero: so much is missing."""
    return (int(card.total * utilization) - card.in_use - card.peak * card.ranks) // card.ranks


def shortage(
    card: Card, utilization: float, *, name: str, batch: int, least: int, length: int, holders: Sequence[Holder] | str
) -> str:
    """One line. `name`: the card; `batch`: tokens in the largest step; `least`: bytes for one sequence of `length`."""
    room = kv_room(card, utilization)
    among = f", over {card.ranks} ranks on it" if card.ranks > 1 else ""
    peaks = f"{card.ranks} x {_gib(card.peak)}" if card.ranks > 1 else _gib(card.peak)
    return (
        f"too little memory for the KV cache on {name}: {utilization:g} x {_gib(card.total)}"
        f" - {_gib(card.in_use)} in use (this rank's weights {_gib(card.own)}, all else {_gib(card.in_use - card.own)})"
        f" - {peaks} for a step of {batch} tokens{among} = {_gib(room)}, but one sequence of {length} tokens takes"
        f" {_gib(least)}; {_held(holders)}; free some, raise --gpu-memory-utilization,"
        " or lower --max-model-len or --max-num-batched-tokens"
    )


def no_room_for_weights(total: int, free: int, *, name: str, holders: Sequence[Holder] | str) -> str:
    """One line: the card was full before the model was on it."""
    return (
        f"the model does not fit on {name}: {_gib(free)} of {_gib(total)} are free;"
        f" {_held(holders)}; free some, use more ranks (--tp), or give a smaller --dtype or model"
    )


def _held(holders: Sequence[Holder] | str) -> str:
    if isinstance(holders, str):
        return holders
    if not holders:
        return "the driver names nobody who holds memory on that card"
    shown = [
        f"pid {holder.pid} ({holder.title or 'not shown here'}) "
        + ("an unknown part" if holder.size is None else _gib(holder.size))
        for holder in holders
    ]
    return f"on that card: {', '.join(shown)}"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
