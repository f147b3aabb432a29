"""Small models for export_test.py: what exports, and what must be refused."""

import random

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient pass: derivatives of round would be 0."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Doubled(torch.autograd.Function):
    """A backward that is what differentiation gives."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Marked(torch.Tensor):
    """A subclass, as those of quantization libraries are."""


class Reversed(torch.autograd.Function):
    """Gradient reversal: the backward is the point of it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)


class UsesStraight(OneLayer):
    def forward(self, x):
        return Straight.apply(self.layer(x))


class UsesDoubled(OneLayer):
    def forward(self, x):
        return Doubled.apply(self.layer(x))


class ReversesItsInput(OneLayer):
    def forward(self, x):
        return self.layer(Reversed.apply(x))


class ReversesInEval(OneLayer):
    def forward(self, x):
        y = self.layer(x)
        return y if self.training else Reversed.apply(y)


class WeighsClasses(OneLayer):
    """Cross entropy has no derivative with respect to its weights."""

    def forward(self, x, weights):
        return nn.functional.cross_entropy(self.layer(x), torch.arange(4), weights)


class Unfinished(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("not meant to be trained")


class UnfinishedInEval(OneLayer):
    def forward(self, x):
        y = self.layer(x)
        return y if self.training else Unfinished.apply(y)


class Stops(torch.autograd.Function):
    """No gradient passes."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_non_differentiable(y := x.clone())
        return y

    @staticmethod
    def backward(ctx, gradient):
        return None


class StopsTheGradient(OneLayer):
    def forward(self, x):
        return Stops.apply(self.layer(x))


class WritesIntoItsInput(OneLayer):
    def forward(self, x):
        return self.layer(x.add_(1))


@torch.library.custom_op("tessera_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(lambda x: torch.empty_like(x))
doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


class UsesAnOperatorOfPython(OneLayer):
    def forward(self, x):
        return doubled(self.layer(x))


class UsesVmap(OneLayer):
    def forward(self, x):
        return torch.vmap(self.layer)(x)


class UsesFlexAttention(nn.Module):
    def forward(self, x):
        return flex_attention(x, x, x)


class Conjugated(OneLayer):
    """Rotations that are turned back; a view of them is negated. The storages hold neither."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(8), torch.arange(8.0)).conj())
        self.register_buffer("sine", torch.polar(torch.ones(8), torch.arange(8.0)).conj().imag)

    def forward(self, x):
        return torch.view_as_real(self.layer(x) * self.table) * self.sine[0]


class Checkpointed(OneLayer):
    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


class ChangesItsWeight(OneLayer):
    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return self.layer(x)


class Counts(OneLayer):
    def __init__(self, matters):
        super().__init__()
        self.calls = 0
        self.matters = matters

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * (self.calls if self.matters else 1)


class CountsInABuffer(OneLayer):
    """Python makes a new tensor of each count and calls it the buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.layer(x) * self.calls


class LeavesItsLoss(OneLayer):
    """What a mixture of experts does with its auxiliary loss."""

    def __init__(self, how):
        super().__init__()
        self.how, self.losses, self.stats, self.loss = how, [], {}, None

    def forward(self, x):
        y = self.layer(x)
        if self.how == "attribute":
            self.loss = y.square().mean()
        elif self.how == "list":
            self.losses.append(y.square().mean())
        elif self.how == "dictionary":
            self.stats["loss"] = y.square().mean()
        return y


class KeepsATable(OneLayer):
    """Made in the first call."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(8.0)
        return self.layer(x) * self.table


class AddsAHookWhenFirstCalled(OneLayer):
    """As models of Hugging Face do, to see what their layers give."""

    def forward(self, x):
        if not getattr(self, "has_hook", False):
            self.layer.register_forward_hook(lambda module, inputs, output: 2 * output)
            self.has_hook = True
        return self.layer(x)


class KeepsTheLast(OneLayer):
    def __init__(self):
        super().__init__()
        self.last = torch.zeros(8)

    def forward(self, x):
        y = self.layer(x) + self.last
        self.last = y.detach().mean(0)
        return y


class SometimesSkips(OneLayer):
    """Stochastic depth, with a rate that a comparison never meets."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x if self.draw() < 0.0 else self.layer(x)


class BranchesOnTraining(OneLayer):
    def forward(self, x):
        return self.layer(x) if self.training else self.layer(x).softmax(-1)


class BranchesOnValues(OneLayer):
    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


class DrawsFromPython(OneLayer):
    def forward(self, x):
        return self.layer(x) * random.random()


class ReturnsNames(OneLayer):
    def forward(self, x, scale=1.0, *, shift=None):
        y = self.layer(x) * scale
        return {"y": y if shift is None else y + shift, "pair": (y.sum(), [y.mean()])}


class Tied(nn.Module):
    """An embedding and a head that are one parameter, a non-contiguous weight and dropout."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.middle = nn.Linear(8, 8)
        self.middle.weight = nn.Parameter(torch.randn(8, 8).t())
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5]), persistent=False)

    def forward(self, ids):
        x = self.middle(self.embedding(ids))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.dropout(x)) * self.scale
