"""Which layers of a KV group own which planes, and which read another's.

Most formats are alike in all layers. Where they are not (widths by layer, codes shared by a pair of layers),
a plane's tensor holds the layers that own it and no others, and a layer that reads another's bytes is given
that layer's rows. Pages are page ids in every plane, so layers that share bytes share the fate of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from workbench.engine.seams import KVCodec, PageGeometry, PlaneSpec
from workbench.spec.errors import InvariantError, OptionError


@dataclass(frozen=True)
class GroupPlanes:
    """``specs`` by name; ``owners[name]`` local layers, one per row of the plane's tensor.

    ``rows[layer][name]`` is the row that a layer reads.
    """

    specs: dict[str, PlaneSpec]
    owners: dict[str, list[int]]
    rows: list[dict[str, int]]


def layer_numbers(geometry: PageGeometry, layers: Sequence[int] | None) -> list[int]:
    """The model's number of each layer of a group, -1 for a drafter's; by default the group is the model."""
    known = range(geometry.layers) if layers is None else layers
    return [known[i] if i < len(known) else -1 for i in range(geometry.layers)]


def group_planes(codec: KVCodec, geometry: PageGeometry, numbers: Sequence[int]) -> GroupPlanes:
    """The planes of the layers of these model numbers.

    Raises :class:`OptionError` when a layer reads the bytes of one that is not in the group before it, or
    when the geometry cannot be encoded.
    """
    made = GroupPlanes({}, {}, [])
    for local, number in enumerate(numbers):
        made.rows.append({})
        for spec in codec.at(number).planes(geometry):
            first = made.specs.setdefault(spec.name, spec)
            if (first.dtype, first.shape) != (spec.dtype, spec.shape):
                raise InvariantError(f"Plane {spec.name} of {codec.key} has two shapes in one KV group.")
            owners = made.owners.setdefault(spec.name, [])
            if spec.owner is None:
                owners.append(local)
                made.rows[-1][spec.name] = len(owners) - 1
                continue
            row = (
                made.rows[numbers.index(spec.owner)].get(spec.name) if spec.owner in numbers[:local] else None
            )
            if row is None:
                raise OptionError(
                    f"Layer {number} reads the KV codes of layer {spec.owner}, which is not in its KV group.",
                    hint="Share codes between layers of one attention type only, or switch sharing off.",
                )
            made.rows[-1][spec.name] = row
    return made


def zeros(geometry: PageGeometry, layers: int, rows: int, spec: PlaneSpec) -> Tensor:
    """A plane [layers, rows, *shape]; raises :class:`OptionError` when the device refuses the memory."""
    whole = (layers, rows, *spec.shape)
    try:
        return torch.zeros(whole, dtype=spec.dtype, device=geometry.device)
    except RuntimeError:  # torch's only word for memory that the machine refuses
        gib = prod(whole) * spec.dtype.itemsize / 2**30
        raise OptionError(
            f"A part of the KV pool needs {gib:,.1f} GiB on {geometry.device}, which cannot be had.",
            hint="Lower kv_pool_tokens, or choose a smaller KV format.",
        ) from None
