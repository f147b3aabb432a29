"""Architectures of plain torch for the zoo: what torchvision and others have, small."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

VOCABULARY = 64


def ids(batch=2, length=12):
    return torch.randint(0, VOCABULARY, (batch, length))


# ---- Language ------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width, heads, mlp, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = mlp

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Tied embedding and head, dropout in attention and beside it."""

    def __init__(self, make_mlp, width=32, layers=2, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(32, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4, make_mlp(width), dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def dense(width):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class SharedBlocks(nn.Module):
    """In the manner of ALBERT and of universal transformers: two blocks in turn, each called twice, and the first once more
    under another name."""

    def __init__(self, width=32, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 4, dense(width), dropout) for _ in range(2))
        self.last = self.blocks[0]
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(self.last(x))


class SoftExperts(nn.Module):
    """Each token goes through its two best experts; all experts run, in one batched product."""

    def __init__(self, width, experts=4, chosen=2):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / math.sqrt(2 * width))

    def forward(self, x):
        logits = self.router(x)
        best, which = logits.topk(self.chosen, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, which, best.softmax(-1))
        every = torch.einsum("btd,edh->beth", x, self.up)
        every = torch.einsum("beth,ehd->betd", F.silu(every), self.down)
        return torch.einsum("betd,bte->btd", every, weights)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.rnn = kind(16, 24, num_layers=2, batch_first=True, dropout=0.1, **options)
        self.head = nn.Linear(48 if options.get("bidirectional") else 24, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.tokens(tokens))[0])


class CellByCell(nn.Module):
    """A loop over a fixed length, unrolled by the export."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)
        self.start = nn.Parameter(torch.zeros(2, 16))

    def forward(self, x):
        state = tuple(self.start[i].expand(x.shape[0], -1) for i in range(2))
        outputs = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), state


class DiagonalStateSpace(nn.Module):
    """S4D: a long convolution by FFT, whose kernel comes from complex poles."""

    def __init__(self, width=16, states=8):
        super().__init__()
        self.log_step = nn.Parameter(torch.linspace(-3, -1, width))
        self.log_decay = nn.Parameter(torch.log(0.5 * torch.ones(width, states)))
        self.frequency = nn.Parameter(math.pi * torch.arange(states, dtype=torch.float32).repeat(width, 1))
        self.output = nn.Parameter(0.3 * torch.randn(width, states, 2))
        self.skip = nn.Parameter(torch.randn(width))
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        length = x.shape[1]
        pole = torch.complex(-self.log_decay.exp(), self.frequency) * self.log_step.exp()[:, None]
        power = torch.exp(pole[..., None] * torch.arange(length, device=x.device))
        kernel = 2 * torch.einsum("dn,dnl->dl", torch.view_as_complex(self.output), power).real
        y = torch.fft.irfft(torch.fft.rfft(x.transpose(1, 2), n=2 * length) * torch.fft.rfft(kernel, n=2 * length),
                            n=2 * length)[..., :length]
        return self.mix(F.gelu(y.transpose(1, 2) + x * self.skip))


class SelectiveScan(nn.Module):
    """The recurrence of Mamba without its kernel, over a fixed length."""

    def __init__(self, width=16, states=4):
        super().__init__()
        self.project = nn.Linear(width, 2 * states + 1)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))

    def forward(self, x):
        states = self.log_decay.shape[1]
        step, b, c = self.project(x).split([1, states, states], -1)
        step = F.softplus(step)
        decay = torch.exp(-step[..., None] * self.log_decay.exp())
        drive = step[..., None] * b[:, :, None, :] * x[..., None]
        state, outputs = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            outputs.append((state * c[:, t, None, :]).sum(-1))
        return torch.stack(outputs, 1) + x * self.skip


# ---- Images --------------------------------------------------------------------------


def conv(inputs, outputs, kernel=3, stride=1, groups=1):
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
                         nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(conv(inputs, outputs, stride=stride),
                                  nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Sequential() if stride == 1 and inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x))


def head(width):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def resnet():
    return nn.Sequential(conv(3, 8), nn.MaxPool2d(2), Residual(8, 8, 1), Residual(8, 16, 2), head(16))


def vgg():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
                         nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 32), nn.ReLU(True),
                         nn.Dropout(), nn.Linear(32, 5))


def mobilenet():
    def separable(inputs, outputs, stride):
        return nn.Sequential(conv(inputs, inputs, stride=stride, groups=inputs), conv(inputs, outputs, 1))

    return nn.Sequential(conv(3, 8, stride=2), separable(8, 16, 1), separable(16, 16, 2), nn.Hardswish(), head(16))


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(3 + 4 * i), nn.ReLU(), nn.Conv2d(3 + 4 * i, 4, 3, padding=1))
                                    for i in range(3))
        self.head = head(15)

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(x)


class SqueezeExcite(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width // 4, 1), nn.SiLU(),
                                  nn.Conv2d(width // 4, width, 1), nn.Sigmoid())

    def forward(self, x):
        return x * self.gate(x)


class UNet(nn.Module):
    """As diffusion models have it: group norm, attention in the middle, time as an input."""

    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.leave = nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 3, 3, padding=1))
        self.register_buffer("frequencies", torch.exp(-torch.arange(width // 2) / (width // 2)), persistent=False)

    def forward(self, x, time):
        angle = time[:, None] * self.frequencies
        h = self.enter(x) + self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None]
        d = F.silu(self.norm(self.down(h)))
        tokens = d.flatten(2).transpose(1, 2)
        d = d + self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).view_as(d)
        up = F.interpolate(self.up(d), size=h.shape[2:], mode="nearest")
        return self.leave(torch.cat([up, h], 1))


class Autoencoder(nn.Module):
    """Draws its own noise."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, 16))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.PReLU(), nn.Linear(32, 192), nn.Unflatten(1, (3, 8, 8)))

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, 1)
        return {"image": self.decode(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()),
                "latent": (mean, log_variance)}


class Mixer(nn.Module):
    def __init__(self, tokens=16, width=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.within = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.within(self.norm2(x))
        return self.head(x.mean(1))


# ---- Operators that need care --------------------------------------------------------


class Fourier(nn.Module):
    """A Fourier neural operator: complex weights."""

    def __init__(self, width=8, modes=4):
        super().__init__()
        self.modes = modes
        self.enter, self.leave = nn.Linear(1, width), nn.Linear(width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)

    def forward(self, x):
        h = self.enter(x).transpose(1, 2)
        low = torch.einsum("bim,iom->bom", torch.fft.rfft(h)[..., : self.modes], torch.view_as_complex(self.weight))
        return self.leave(F.gelu(torch.fft.irfft(low, n=x.shape[1]).transpose(1, 2)))


class Bags(nn.Module):
    """Bags of words, sums by index and a sort."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, 16, mode="mean")
        self.other = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        bag = self.words(tokens)
        ordered, _ = self.other(tokens).sort(dim=1)
        gathered = torch.zeros_like(bag).index_add(0, torch.arange(bag.shape[0]).flip(0), ordered[:, -1])
        return self.head(bag + gathered), torch.cumsum(bag, 0).logsumexp(1)


class Normed(nn.Module):
    """Weights that are computed: a weight norm and a spectral norm, which changes buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Statistics(nn.Module):
    """Buffers that forward changes: a running mean by hand, a counter, batch norm in 1 and 3 dimensions."""

    def __init__(self):
        super().__init__()
        self.norm1, self.conv, self.norm3 = nn.BatchNorm1d(8), nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, volume):
        x = self.norm1(self.layer(x))
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.seen.add_(1)
        return x - self.mean, self.norm3(self.conv(volume)).mean((2, 3, 4))


class Choice(nn.Module):
    """A branch on values that exports: torch.cond."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.one(y).relu(), lambda y: self.other(y).tanh(), (x,))


class Contexts(nn.Module):
    """Parts without gradients and a part under autocast, which are graphs in the graph."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            gate = self.one(x).sigmoid()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.two(x)
        with torch.autocast("cpu", enabled=False):
            return self.three(x.to(gate.dtype) * gate)


class ListsAndNumbers(nn.Module):
    """Shapes as numbers: arithmetic on dynamic sizes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.layer(x)
        mean = y.sum((0, 1)) / (batch * length + 1)
        ramp = torch.arange(0, 3 * length, 3, device=x.device, dtype=x.dtype) / (2 * length - 1)
        return [mean, {"whole": y * ramp[:, None], "padded": torch.zeros(length // 2 + 1, batch, dtype=x.dtype)}]


def image(size=16):
    return lambda: ((torch.randn(2, 3, size, size),), {}, ({0: Dim("batch", min=2, max=64)},))


def words():
    return (ids(),), {}, ({0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=32)},)


def words_of_12():
    """An RNN of torch.nn exports for one length."""
    return (ids(),), {}, ({0: Dim("batch", min=2, max=64)},)


def fixed(*shapes):
    return lambda: (tuple(torch.randn(*shape) for shape in shapes), {}, None)


MODELS = {
    "language": {
        "gpt": (lambda: Gpt(dense), words),
        "gpt_experts": (lambda: Gpt(SoftExperts), words),
        "shared_blocks": (SharedBlocks, words),
        "lstm": (lambda: Recurrent(nn.LSTM), words_of_12),
        "gru_bidirectional": (lambda: Recurrent(nn.GRU, bidirectional=True), words_of_12),
        "rnn": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), words_of_12),
        "lstm_cell": (CellByCell, fixed((2, 6, 8))),
        "s4d": (DiagonalStateSpace, fixed((2, 16, 16))),
        "selective_scan": (SelectiveScan, fixed((2, 10, 16))),
        "transformer": (lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True), fixed((2, 6, 16), (2, 5, 16))),
    },
    "images": {
        "resnet": (resnet, image()),
        "vgg": (vgg, image()),
        "mobilenet": (mobilenet, image()),
        "densenet": (DenseNet, image(8)),
        "squeeze_excite": (lambda: nn.Sequential(conv(3, 8), SqueezeExcite(8), head(8)), image()),
        "unet": (UNet, lambda: ((torch.randn(2, 3, 16, 16), torch.tensor([3.0, 40.0])), {}, None)),
        "autoencoder": (Autoencoder, image(8)),
        "mixer": (Mixer, image()),
    },
    "operators": {
        "fourier": (Fourier, fixed((2, 16, 1))),
        "bags": (Bags, lambda: ((ids(),), {}, None)),
        "norms": (Normed, fixed((4, 8))),
        "statistics": (Statistics, fixed((4, 8), (2, 1, 4, 4, 4))),
        "cond": (Choice, fixed((4, 8))),
        "contexts": (Contexts, fixed((4, 8))),
        "shapes": (ListsAndNumbers,
                   lambda: ((torch.randn(3, 5, 8),), {}, ({0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=32)},))),
    },
}


def build(entry):
    """The model and its inputs: module, args, kwargs, dynamic shapes."""
    make, inputs = entry
    return (make(), *inputs())
