"""What the inputs of networks look like, as far as the server knows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedfuse.core.inputs import InputForm, own_form, reads_tokens, shape_read
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import RecipeError


def input_form(bench: Bench, spec: Spec) -> InputForm:
    """What an input of a network looks like: as the bench or its rows say, else the network's options or first layer.

    Raises:
        RecipeError: if none of these tells.

    Example:
        >>> input_form(Bench(), Spec("lenet", {"size": 32, "channels": 3})).shape
        (3, 32, 32)
    """
    found = _known_form(bench) or own_form(spec) or _form_of_first_layer(spec)
    if found is None:
        raise RecipeError(
            f"model {spec.factory!r}: nobody says what its inputs look like; "
            "give the server some rows or inputs without labels"
        )
    shape = shape_read(spec, found.shape)
    return found if shape == found.shape else InputForm(shape, (min(found.low),), (max(found.high),))


def _known_form(bench: Bench) -> InputForm | None:
    if bench.inputs is not None:
        return bench.inputs
    inputs = bench.rows.x if bench.rows is not None else bench.unlabelled
    if inputs is None:
        return None
    return InputForm(tuple(inputs.shape[1:]), tokens=0 if inputs.is_floating_point() else 1 + max(0, int(inputs.max())))


def _form_of_first_layer(spec: Spec) -> InputForm | None:
    """Inputs that go straight to a linear layer can be told from its weight."""
    first = next(iter(spec.layout.layers), None)
    if first is None or first.kind != "linear":
        return None
    return InputForm((spec.shapes()[first.weight][0][1],))


def common_form(bench: Bench, specs: Sequence[Spec]) -> InputForm:
    """What an input of several networks looks like, in whichever order they come.

    Where only they can tell, it is the form with the most axes: a fully connected network flattens pictures.

    Raises:
        RecipeError: if none of them tells, or they read inputs of unequal size.

    Example:
        >>> common_form(Bench(), [Spec("mlp"), Spec("lenet")]).shape
        (1, 28, 28)
    """
    if (known := _known_form(bench)) is not None:
        return known
    forms = [form for spec in specs if (form := own_form(spec)) is not None]
    if not forms:
        return input_form(bench, specs[0])
    if len({math.prod(form.shape) for form in forms}) > 1:
        shapes = " and ".join(sorted({"×".join(map(str, form.shape)) for form in forms}))
        raise RecipeError(f"networks that read inputs of {shapes} have none in common; fuse those that read the same")
    return max(forms, key=lambda form: (len(form.shape), form.shape))


def synthetic_form(bench: Bench, specs: Sequence[Spec]) -> InputForm:
    """What an input looks like that is to be made for several networks.

    Raises:
        RecipeError: also if one of them reads whole numbers, which cannot be found by following a slope.
    """
    form = common_form(bench, specs)
    if tokens := [spec for spec in specs if reads_tokens(spec, form.shape)]:
        raise RecipeError(
            f"model {tokens[0].factory!r} reads whole numbers, so no inputs can be made for it; "
            "learn on the server's rows or on inputs without labels"
        )
    return form
