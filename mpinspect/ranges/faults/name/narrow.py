"""Faults of a conversion to FP8 or FP4: layers that it left out, and layers that it converted although they should stay wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mpinspect.numeric.recipes import recipe_of
from mpinspect.ranges.analysis.products import (
    ConvertedLayer,
    alike,
    is_named_head,
    is_named_router,
    is_narrow,
    ledger,
    modules_named,
    products_named,
)
from mpinspect.ranges.faults.name.case import MOST_LAYERS_LISTED, Case, quoted
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.session import CONVERTER_CALLED
from mpinspect.reporting.sentences import Said, Sentences

#: The layers of one block that compute from one input; a conversion that takes some of them has missed the others.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
#: The divisor that kernels ask of sizes, for products of an unknown recipe.
_MULTIPLE = 16


def _of(
    modules: Sequence[str], says: Said, fix: Said, code: Said = (), *, severity: str = "", **words: object
) -> Found:
    """Return the occurrence in these modules, which the sentences may name."""
    return Found(
        says,
        {"modules": list(modules[:MOST_LAYERS_LISTED]), "of": len(modules)},
        {"names": modules_named(modules), **words},
        fix,
        code,
        layer=modules[0],
        severity=severity,
    )


class _Nothing(Sentences):
    CALLED = (
        "convert_to_float8_training was called in this process, and none of the {layers:count layer} of this model is converted: "
        "everything is computed as before."
    )
    CONFIGURED = (
        "A training configuration of torchao exists in this process, and none of the {layers:count layer} of this model is "
        "converted: everything is computed as before."
    )
    NOT_LINEAR = "{others:count layer} of the class {kind} can't be converted: torchao converts nn.Linear alone."
    CHECK_FILTER = (
        "Compare the filter's names with model.named_modules(), and check that the converted model is trained."
    )
    CODE = (
        "names = [\n"
        "    name\n"
        "    for name, each in model.named_modules()\n"
        "    if isinstance(each, torch.nn.Linear)\n"
        "]\n"
        "print(names)"
    )


def _nothing_converted(case: Case) -> Iterator[Found]:
    """A conversion to FP8 or MXFP8 by torchao that left every layer of the model as it was.

    False alarms: It is inferred from the process: the conversion may have been of another model.
    """
    layers = ledger(case.precision)
    if not case.precision.asked or not layers or is_narrow(case.precision):
        return
    others = [layer for layer in layers if layer.record.type == "Conv1D"]
    yield Found(
        (
            _Nothing.CALLED.when(CONVERTER_CALLED in case.precision.asked) or _Nothing.CONFIGURED,
            _Nothing.NOT_LINEAR.when(others),
        ),
        {"layers": len(layers), "asked": list(case.precision.asked)},
        {"others": len(others), "kind": "Conv1D"},
        _Nothing.CHECK_FILTER,
        _Nothing.CODE,
        is_inferred=True,
    )


class _Wide(Sentences):
    HEAD = (
        "The head {name!r} computes in {recipe}. Errors of the model's output enter the loss directly, and published recipes "
        "keep the head in BF16."
    )
    ROUTER = (
        "The choice of experts ({names}) is computed in {recipe}. Rounding swaps scores that are close to each other, and "
        "published recipes keep routers in BF16 or FP32."
    )
    LEAVE_OUT = "Leave {kept} out of the conversion."
    CODE = (
        "KEEP = {keep}\n"
        "def chosen(module, name):\n"
        "    return name not in KEEP and isinstance(\n"
        "        module, torch.nn.Linear\n"
        "    )\n"
        "# as the filter\n"
        "convert(model, chosen)"
    )


def _narrow_head(case: Case) -> Iterator[Found]:
    """A head that computes in FP8 or FP4: a layer that makes the model's output, shares its weight with an embedding or is
    named as heads are.

    False alarms: Some trainings keep their quality with a head in FP8.
    """
    return (_keep_wide(_Wide.HEAD, [layer], case) for layer in _narrow(case, _is_head))


def _narrow_router(case: Case) -> Iterator[Found]:
    """Routers of experts that compute in FP8 or FP4.

    False alarms: A layer that is named router or gate and chooses no experts is reported.
    """
    if routers := _narrow(case, _is_router):
        yield _keep_wide(_Wide.ROUTER, routers, case)


def _is_head(layer: ConvertedLayer) -> bool:
    return layer.record.is_head or is_named_head(layer.module)


def _is_router(layer: ConvertedLayer) -> bool:
    return is_named_router(layer.module)


def _narrow(case: Case, is_kind: Callable[[ConvertedLayer], bool]) -> list[ConvertedLayer]:
    return [layer for layer in ledger(case.precision) if layer.is_narrow and is_kind(layer)]


def _keep_wide(says: _Wide, layers: Sequence[ConvertedLayer], case: Case) -> Found:
    """Return the occurrence in these layers; its change leaves out all heads and routers, since a model is converted once."""
    names = [layer.module for layer in layers]
    both = dict.fromkeys(layer.module for layer in (*_narrow(case, _is_router), *_narrow(case, _is_head)))
    keep = ", ".join(map(quoted, list(both)[:MOST_LAYERS_LISTED]))
    recipe, kept = products_named(layers[0].products), modules_named(both)
    return _of(names, says, _Wide.LEAVE_OUT, _Wide.CODE, name=names[0], recipe=recipe, kept=kept, keep=f"{{{keep}}}")


class _Unlike(Sentences):
    SIBLINGS = (
        "Only some of the layers that take one input are converted: {narrow} in {recipe}, {names} not. A filter by names has "
        "probably missed the others."
    )
    BLOCKS = "{names} are not converted, and the same layers of other blocks are."
    CONVERT_ALIKE = "Let the filter treat them in one way, or change nothing if the difference is intended."


def _converted_in_part(case: Case) -> Iterator[Found]:
    """Layers of one kind, only some of them converted: q and k but not v, or scattered blocks.

    The first blocks or the last ones, left wide, are a common recipe and not reported.

    False alarms: A difference that is meant is reported.
    """
    layers = ledger(case.precision)
    if not is_narrow(case.precision):
        return
    yield from _siblings(layers)
    wide = [
        layer
        for members in alike(layers)
        if any(layer.is_narrow for layer in members) and not _is_edge(members)
        for layer in members
        if not layer.is_narrow
    ]
    if wide:
        yield _of([layer.module for layer in wide], _Unlike.BLOCKS, _Unlike.CONVERT_ALIKE, severity="info")


def _is_edge(members: Sequence[ConvertedLayer]) -> bool:
    """Return whether the layers that are left wide are those of the first and of the last blocks."""
    ordered = [layer.is_narrow for layer in sorted(members, key=lambda layer: layer.numbers)]
    first, last = ordered.index(True), len(ordered) - ordered[::-1].index(True)
    return all(ordered[first:last])


def _siblings(layers: Sequence[ConvertedLayer]) -> Iterator[Found]:
    by_path = {layer.module: layer for layer in layers}
    found: dict[tuple[str, ...], list[tuple[ConvertedLayer, ...]]] = {}
    for layer in layers:
        parent, _, own = layer.module.rpartition(".")
        for together in _TOGETHER:
            if own == together[0]:
                paths = (f"{parent}.{name}".lstrip(".") for name in together)
                family = tuple(by_path[path] for path in paths if path in by_path)
                if 0 < sum(each.is_narrow for each in family) < len(family):
                    found.setdefault(tuple(each.pattern for each in family if not each.is_narrow), []).append(family)
    for families in found.values():
        narrow = [each for family in families for each in family if each.is_narrow]
        wide = [each for family in families for each in family if not each.is_narrow]
        modules = [each.module for each in wide]
        converted, recipe = modules_named(each.module for each in narrow), products_named(narrow[0].products)
        yield _of(modules, _Unlike.SIBLINGS, _Unlike.CONVERT_ALIKE, narrow=converted, recipe=recipe)


class _Sizes(Sentences):
    REFUSED = (
        "Layers of {shapes} features compute in {recipe}, whose kernels take multiples of {multiple} only: on a GPU they raise "
        "an error ({names})."
    )
    LEAVE_OUT = "Pad these sizes, or leave these modules out of the conversion."


def _refused_sizes(case: Case) -> Iterator[Found]:
    """Converted layers whose sizes the kernels of a GPU refuse; an emulation or a CPU may compute them.

    False alarms: A later version of the library may pad such sizes. TransformerEngine's layers are left out: they raise an error.
    """
    for record in case.precision.layers:
        recipe = recipe_of(record.products)
        multiple = recipe.multiple if recipe is not None else _MULTIPLE
        if record.products.bits is None or record.library != "torchao" or len(record.shape) != 2:
            continue
        if any(size % multiple for size in record.shape):
            shapes, computed = " x ".join(map(str, record.shape)), products_named(record.products)
            found = _of(
                record.modules, _Sizes.REFUSED, _Sizes.LEAVE_OUT, shapes=shapes, recipe=computed, multiple=multiple
            )
            yield replace(found, evidence={**found.evidence, "shape": list(record.shape)})


class _Bias(Sentences):
    LOST = (
        "The biases of {names} got no gradient in a step in which their weights did: torchao's conversion to {recipe} leaves "
        "them out of the product, so the layers compute without their bias."
    )
    LEAVE_OUT = "Leave layers with a bias out of the conversion, or add the bias in a module of its own."
    CODE = (
        "def filter_fn(module, name):\n"
        "    is_linear = isinstance(\n"
        "        module, torch.nn.Linear\n"
        "    )\n"
        "    return is_linear and module.bias is None"
    )


def _bias_left_out(case: Case) -> Iterator[Found]:
    """Biases that a conversion of the weights leaves out of the forward, as that to MXFP8 of torchao 0.18 does.

    False alarms: In a converted layer, a bias whose gradient the script removes itself is reported too.
    """
    records = [
        record
        for record in case.precision.layers
        if record.without_bias and record.products.bits is not None and record.library == "torchao"
    ]
    names = [module for record in records for module in record.modules]
    if names:
        recipe = products_named(records[0].products)
        yield _of(names, _Bias.LOST, _Bias.LEAVE_OUT, _Bias.CODE, recipe=recipe)


FAULTS = (
    Fault("bias-left-out", "error", _bias_left_out, (_Bias,), ("gradients-missing",)),
    Fault("nothing-converted", "warning", _nothing_converted, (_Nothing,)),
    Fault("narrow-head", "warning", _narrow_head, (_Wide,)),
    Fault("narrow-router", "warning", _narrow_router, (_Wide,)),
    Fault("converted-in-part", "warning", _converted_in_part, (_Unlike,)),
    Fault("sizes-refused", "warning", _refused_sizes, (_Sizes,)),
)
