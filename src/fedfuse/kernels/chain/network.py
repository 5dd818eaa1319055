"""A network as a chain of layers at work: it loads weights, goes through batches, and gives the weights back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedfuse.core.settings import LocalSettings
from fedfuse.kernels.chain.buffers import FlatTensors, Images, Table, images_in, rows_in
from fedfuse.kernels.chain.description import (
    Activation,
    Conv,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MeanFieldLinear,
    Norm,
    PoolLayer,
    Shape,
    Uncovered,
    VarianceLearning,
    shape_after,
)
from fedfuse.kernels.chain.layers import (
    ConvOp,
    LinearOp,
    MeanFieldOp,
    NormOp,
    Numbers,
    Op,
    Variances,
    dropout,
    max_pool,
    mean_pool,
    relu,
    tanh,
    to_table,
)
from fedfuse.kernels.chain.learn import (
    CompiledAdam,
    CompiledSgd,
    add_signs,
    cross_entropy,
    make_descent,
    norm_of,
    pull,
    pulled_step,
    rows_needed,
)
from fedfuse.kernels.chain.tables import learn_variances, write_variances
from fedfuse.kernels.target import Floats, Ints

_NOTHING = np.zeros(0, np.float32)


@dataclass(slots=True)
class Round:
    """What one client's training carries from batch to batch besides the weights."""

    settings: LocalSettings
    mu: float
    anchor: Floats
    linear: Floats
    descent: CompiledSgd | CompiledAdam
    posterior: VarianceLearning | None = None


class LayerReading(NamedTuple):
    """What a layer with weights reads of a batch, and the gradient at its output."""

    name: str
    inputs: Tensor
    gradients: Tensor


class Chain:
    """The layers of a network, with room for batches of a size.

    Args:
        layers: in their order.
        shape: of one example.
        batch: the most examples in a batch.
    """

    def __init__(self, layers: Sequence[Layer], shape: Shape, batch: int) -> None:
        self._weights, self._statistics, self._log_variances = FlatTensors(), FlatTensors(), FlatTensors()
        self._variances = Variances(_NOTHING, _NOTHING, _NOTHING, (_NOTHING, _NOTHING, _NOTHING))
        self._numbers = Numbers(_NOTHING, _NOTHING, _NOTHING)
        self._batch, self._dropouts = batch, 0
        layers = list(layers)
        self._flat = bool(layers) and isinstance(layers[0], Flatten)
        if self._flat:  # rows as they lie: nothing convolves them
            layers, shape = layers[1:], shape_after(layers[0], shape)
        self._shape = shape
        self._order: Shape | None = None  # channels, height, width that the columns of a table came from
        self._ops = list(self._build(layers, shape))
        own, weights = self._numbers, self._weights
        own.weights, own.grads, own.statistics = weights.zeros(), weights.zeros(), self._statistics.zeros()
        self._anchor, self._remembered = weights.zeros(), list[Floats]()
        self._gaussian = [op for op in self._ops if isinstance(op, MeanFieldOp)]
        made, zeros = self._variances, self._log_variances.zeros
        made.rho, made.values, made.slopes, made.prior = zeros(), zeros(), zeros(), (zeros(), zeros(), zeros())

    def _build(self, layers: Sequence[Layer], shape: Shape) -> Iterator[Op]:
        self._start = self._end = self._buffer(shape, layers[0])
        for i, layer in enumerate(layers):
            before, shape = shape, shape_after(layer, shape)
            x, y = self._end, self._buffer(shape, layers[i + 1] if i + 1 < len(layers) else None)
            yield self._op(layer, before, x, y, first=i == 0)
            self._end = y

    def _buffer(self, shape: Shape, reader: Layer | None) -> Images | Table:
        if len(shape) == 1:
            return Table(self._batch, shape[0])
        channels, height, width = shape
        return Images(self._batch, channels, height, width, reader.padding if isinstance(reader, Conv) else 0)

    def _op(self, layer: Layer, shape: Shape, x: Images | Table, y: Images | Table, first: bool) -> Op:
        match layer, x, y:
            case Conv(), Images(), Images():
                return self._conv(layer, shape, x, y, first)
            case MeanFieldLinear(), Table(), Table():
                return self._mean_field(layer, shape, x, y, first)
            case Linear(), Table(), Table():
                return self._linear(layer, shape, x, y, first)
            case Norm(), _, _:
                return self._norm(layer, shape, x, y)
            case PoolLayer(kind=kind), Images(), Images():
                size = (layer.kernel, layer.stride, layer.padding)
                return max_pool(x, y, size) if kind == "max" else mean_pool(x, y, size)
            case Flatten(), Images(), Table():
                self._order = shape
                return to_table(x, y)
            case Dropout(p=p), _, _:
                self._dropouts += 1
                return dropout(x, y, self._numbers, self._dropouts - 1, p)
            case Activation(kind="relu", slope=slope), _, _:
                return relu(x, y, slope)
            case Activation(), _, _:
                return tanh(x, y)
        raise Uncovered(f"{type(layer).__name__} on inputs of shape {shape}")

    def _conv(self, layer: Conv, shape: Shape, x: Images, y: Images, first: bool) -> Op:
        k, tensors = layer.kernel, self._weights
        weights = tensors.add(f"{layer.name}.weight", (layer.outputs, shape[0], k, k), (0, 2, 3, 1), layer.outputs)
        size = (k, layer.stride, tensors.slots[f"{layer.name}.weight"].length)
        return ConvOp(layer.name, x, y, self._numbers, (weights, self._bias(layer)), size, layer.bias, first)

    def _linear(self, layer: Linear, shape: Shape, x: Table, y: Table, first: bool) -> LinearOp:
        inner, axes = (self._order, (0, 2, 3, 1)) if self._order else (shape, (0, 1))
        weights = self._weights.add(f"{layer.name}.weight", (layer.outputs, *inner), axes, layer.outputs)
        order, self._order = self._order or (), None
        return LinearOp(layer.name, x, y, self._numbers, (weights, self._bias(layer)), layer.bias, first, order)

    def _mean_field(self, layer: MeanFieldLinear, shape: Shape, x: Table, y: Table, first: bool) -> Op:
        plain, own = self._linear(layer, shape, x, y, first), self._log_variances
        means = self._weights.slots[f"{layer.name}.weight"]
        begin = own.add(f"{layer.name}.log_variance", means.shape, means.axes, means.rows)
        return MeanFieldOp(plain, self._variances, (begin, own.skip(layer.outputs)), layer.noise)

    def _bias(self, layer: Conv | Linear) -> int:
        """Where the biases begin; a layer without them reads zeros."""
        if not layer.bias:
            return self._weights.skip(layer.outputs)
        return self._weights.add(f"{layer.name}.bias", (layer.outputs,), (0,), 1)

    def _norm(self, layer: Norm, shape: Shape, x: Images | Table, y: Images | Table) -> Op:
        own, axes = (self._order, (1, 2, 0)) if self._order else (shape[:1], (0,))
        places = [self._weights.add(f"{layer.name}.{leaf}", own, axes, 1) for leaf in ("weight", "bias")]
        running = [self._statistics.add(f"{layer.name}.running_{leaf}", own, axes, 1) for leaf in ("mean", "var")]
        pair, other = (places[0], places[1]), (running[0], running[1])
        return NormOp(x, y, self._numbers, pair, other, layer.eps, layer.momentum)

    def begin(
        self,
        module: nn.Module,
        settings: LocalSettings,
        mu: float,
        anchor: Mapping[str, Tensor],
        linear: Mapping[str, Tensor],
        posterior: VarianceLearning | None = None,
    ) -> Round:
        """Load a network's weights and statistics for one client's training.

        Args:
            module: the network.
            settings: how to train.
            mu: strength of the pull towards the anchor.
            anchor: weights that pull.
            linear: a constant added to the gradients.
            posterior: how log-variances learn, where there are any.
        """
        state, weights, own = module.state_dict(), self._weights, self._numbers
        needed = rows_needed(settings.optimizer)
        self._remembered += [weights.zeros() for _ in range(needed - len(self._remembered))]
        remembered = self._remembered[:needed]
        # Rows are filled up to whole lanes, and products and optimizers run over the filling as well. A client that
        # diverged leaves NaN there, and 0 · NaN would reach every output and the norm that clips.
        for row in (own.weights, own.grads, *remembered):
            row.fill(0)
        weights.write({name: state[name] for name in weights.slots}, own.weights)
        self._statistics.write({name: state[name] for name in self._statistics.slots}, own.statistics)
        for op in self._ops:
            if isinstance(op, NormOp):
                op.batches = 0
        if posterior is not None:
            self._begin_variances(state, posterior)
        near = weights.write(anchor, self._anchor) if mu else _NOTHING
        added = weights.write(linear, weights.zeros()) if linear else _NOTHING
        return Round(settings, mu, near, added, make_descent(settings.optimizer, remembered), posterior)

    def _begin_variances(self, state: Mapping[str, Tensor], posterior: VarianceLearning) -> None:
        """Load log-variances and their priors."""
        own, slots = self._variances, self._log_variances
        for row, value in zip((own.rho, own.values, own.slopes, *own.prior), (0, 0, 0, 0, 1, 0), strict=True):
            row.fill(value)
        slots.write({name: state[name] for name in slots.slots}, own.rho)
        for op in self._gaussian:
            begin, count = op.place
            write_variances(own.rho, own.values, begin, begin + count)
        means, precisions, log_variances = own.prior
        for name, (mean, log_variance) in posterior.priors.items():
            slot = slots.slots[f"{name.removesuffix('.weight')}.log_variance"]
            like = state[name]
            wide = torch.as_tensor(log_variance, dtype=like.dtype).expand(like.shape)
            slot.write(means, torch.as_tensor(mean, dtype=like.dtype).expand(like.shape))
            slot.write(precisions, (-wide).exp())
            slot.write(log_variances, wide)

    def batches(
        self, round_: Round, x: Tensor, y: Tensor, order: Tensor, rate: float, draw: torch.Generator
    ) -> list[float]:
        """Go through rows in this order, a step for every batch; gives the batches' losses.

        Args:
            round_: from `begin`.
            x: rows, images with their channels last in memory or not.
            y: their labels.
            order: which rows, in which order.
            rate: the learning rate.
            draw: the stream of dropout's masks.
        """
        rows, labels, places = self._flatten(x), y.numpy(), order.numpy()
        starts = range(0, len(places), round_.settings.batch_size)
        keys = torch.randint(2**32, (len(starts), self._dropouts), generator=draw).tolist()
        losses, end = list[float](), self._end
        for begin, key in zip(starts, keys, strict=True):
            self._numbers.keys = key
            count = self._enter(rows, places, begin, round_.settings.batch_size)
            for op in self._ops:
                op.forward(count)
            loss = cross_entropy(count, end.data, end.form, labels, places, begin, end.grads)  # type: ignore[arg-type]
            for op in reversed(self._ops):
                op.backward(count)
            losses.append(loss + self._learn_variances(round_, rate) + self._step(round_, rate))
        return losses

    def _learn_variances(self, round_: Round, rate: float) -> float:
        """A step of the log-variances, and the prior's pull on the means; gives the divergence's part of the loss."""
        how, own, weights = round_.posterior, self._variances, self._numbers
        if how is None:
            return 0.0
        natural, value = 2 * how.examples * how.rate * rate, 0.0
        rows = (own.rho, own.values, own.slopes, own.prior)
        for op in self._gaussian:
            begin = op.plain.offsets[0]
            value += learn_variances(weights.weights, weights.grads, begin, *rows, op.place, how.weight, natural)
        return value

    def _step(self, round_: Round, rate: float) -> float:
        """The pull, L1, clipping, and the optimizer's step; gives the pull's part of the loss."""
        own, settings, how = self._numbers, round_.settings, round_.descent
        weights, grads, pulls = own.weights, own.grads, (round_.anchor, round_.linear, round_.mu)
        pulled, plain = bool(round_.mu or round_.linear.size), settings.clip is None and not settings.l1
        if plain and pulled and isinstance(how, CompiledSgd) and how.velocity.size:  # one pass for both
            return pulled_step(weights, grads, *pulls, how.velocity, rate, how.momentum, how.weight_decay)
        value = pull(weights, grads, *pulls) if pulled else 0.0
        if settings.l1:
            add_signs(weights, grads, settings.l1)
        scale = 1.0
        if settings.clip is not None:
            norm = norm_of(grads)
            scale = settings.clip / norm if norm > settings.clip else 1.0
        how.step(weights, grads, scale, rate)
        return value

    @torch.no_grad()
    def finish(self, module: nn.Module) -> None:
        """Give the weights and statistics back to the network."""
        state = module.state_dict()
        own, variances = self._numbers, (self._log_variances, self._variances.rho)
        for tensors, row in ((self._weights, own.weights), (self._statistics, own.statistics), variances):
            for name, slot in tensors.slots.items():
                slot.read(row, state[name])
        norms = [op for op in self._ops if isinstance(op, NormOp)]
        counters = [t for n, t in state.items() if n.endswith("num_batches_tracked")]
        for op, counter in zip(norms, counters, strict=True):
            counter += op.batches

    def read_before_head(self, module: nn.Module, x: Tensor) -> Iterator[Tensor]:
        """What the last layer, a linear one, reads of each batch of rows in their order; nothing is learned.

        Args:
            module: the network, whose layers do the same in training and in evaluation.
            x: rows, images with their channels last in memory or not.
        """
        rows, order, *before, head = self._flatten(x), self._load(module, len(x)), *self._ops
        assert isinstance(head, LinearOp)
        for begin in range(0, len(order), self._batch):
            count = self._enter(rows, order, begin, self._batch)
            for op in before:
                op.forward(count)
            yield head.read_inputs(count)

    def read_layers(self, module: nn.Module, x: Tensor, y: Tensor) -> Iterator[list[LayerReading]]:
        """What every layer with weights reads, and the gradient that comes back to it, batch by batch.

        Nothing is learned. Gradients are of the sum of the batch's losses, so that each row's is its own.

        Args:
            module: the network, whose layers do the same in training and in evaluation.
            x: rows, images with their channels last in memory or not.
            y: their labels.
        """
        rows, labels, order, end = self._flatten(x), y.numpy(), self._load(module, len(x)), self._end
        for begin in range(0, len(order), self._batch):
            count = self._enter(rows, order, begin, self._batch)
            for op in self._ops:
                op.forward(count)
            cross_entropy(count, end.data, end.form, labels, order, begin, end.grads)  # type: ignore[arg-type]
            found = []
            for op in reversed(self._ops):
                if isinstance(op, ConvOp | LinearOp):  # the loss is a mean
                    whole = op.first and isinstance(op, ConvOp)  # pictures as they came
                    seen = x[begin : begin + count] if whole else op.read_inputs(count)
                    found.append(LayerReading(op.name, seen, op.read_gradients(count, float(count))))
                    op.pass_back(count)
                else:
                    op.backward(count)
            yield found[::-1]

    def _load(self, module: nn.Module, count: int) -> Ints:
        """Load a network's weights; gives the order of `count` rows as they lie."""
        state = module.state_dict()
        self._numbers.weights.fill(0)  # the filling too, see `begin`
        self._weights.write({name: state[name] for name in self._weights.slots}, self._numbers.weights)
        return np.arange(count)

    def _flatten(self, x: Tensor) -> Floats:
        """The rows as they lie in memory, channels last for images."""
        images = x if self._flat or x.ndim < 4 else x.permute(0, 2, 3, 1)
        flat: Floats = images.reshape(-1).numpy()
        return flat

    def _enter(self, rows: Floats, order: Ints, begin: int, most: int) -> int:
        """Copy the next batch into the first buffer; gives how many rows it has."""
        count, start = min(most, len(order) - begin), self._start
        if isinstance(start, Images):
            images_in(count, rows, order, begin, start.data, start.form)
        else:
            rows_in(count, rows, order, begin, *start.form, start.data)
        return count
