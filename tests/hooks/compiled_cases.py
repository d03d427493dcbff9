"""Small functions to compile, each with a trap for whoever takes memory away between a compiled forward and backward.

Each is called with values [8, 16] and weights [16, 16], which require gradients, and with a buffer [16], which does not
and may be changed. All are float32. Each returns a tensor or a tuple of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as PyTorch's documentation has it
from torch.utils.checkpoint import checkpoint

Case = Callable[[Tensor, Tensor, Tensor], Any]
CASES: dict[str, Case] = {}


def _in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    hidden = x @ w
    hidden.mul_(2).relu_()
    return hidden @ w


CASES |= {
    # What is computed, with nothing special about it.
    "matrix products": lambda x, w, b: (x @ w).relu() @ w,
    "linear with bias": lambda x, w, b: F.linear(F.gelu(F.linear(x, w, b)), w),
    "tanh and sigmoid": lambda x, w, b: torch.sigmoid(torch.tanh(x @ w) @ w),
    "square root and exponential": lambda x, w, b: ((x @ w).exp() + 1.5).sqrt().log() @ w,
    "power and division": lambda x, w, b: (x @ w).pow(3) / ((x @ w).pow(2) + 1),
    "softmax": lambda x, w, b: F.softmax(x @ w, -1) @ w,
    "log softmax and loss": lambda x, w, b: F.cross_entropy(F.silu(x @ w) @ w, torch.arange(8)),
    "layer norm": lambda x, w, b: F.layer_norm(x @ w, (16,), b, b) @ w,
    "group norm": lambda x, w, b: F.group_norm((x @ w).view(2, 4, 16), 2) @ w,
    "rms norm": lambda x, w, b: F.rms_norm(x @ w, (16,), b) @ w,
    "where": lambda x, w, b: torch.where(x @ w > 0, x @ w, (x @ w).sin()) @ w,
    "comparison that is saved": lambda x, w, b: ((x @ w) * (x > 0)) @ w,
    "mean and variance": lambda x, w, b: (x @ w - (x @ w).mean(-1, keepdim=True)) / (x @ w).var(-1, keepdim=True),
    "batched product": lambda x, w, b: torch.bmm((x @ w).view(2, 4, 16), w.expand(2, 16, 16)).relu() @ w,
    "einsum": lambda x, w, b: torch.einsum("ij,kj->ik", (x @ w).cos(), w).sin() @ w,
    "cumulative sum": lambda x, w, b: (x @ w).cumsum(0).relu() @ w,
    "sorted values": lambda x, w, b: (x @ w).sort(-1).values.relu() @ w,
    "greatest values": lambda x, w, b: (x @ w).topk(4)[0].square() @ w[:4],
    "products along a dimension": lambda x, w, b: (x @ w).prod(0) * b,
    "double precision inside": lambda x, w, b: (x @ w).double().exp().float() @ w,
    "bfloat16 inside": lambda x, w, b: (x @ w).bfloat16().sin().float() @ w,
    "complex inside": lambda x, w, b: torch.view_as_real(torch.fft.fft(x @ w)).square().sum(-1) @ w,
    # Random numbers.
    "dropout": lambda x, w, b: F.dropout(x @ w, 0.5) @ w,
    "two dropouts": lambda x, w, b: F.dropout(F.dropout(x @ w, 0.3).relu() @ w, 0.7),
    "noise": lambda x, w, b: (x @ w) * torch.rand(8, 16) + torch.randn(8, 16),
    "noise like a tensor": lambda x, w, b: (x @ w) * torch.rand_like(x @ w).exp(),
    "bernoulli": lambda x, w, b: (x @ w) * torch.bernoulli(torch.sigmoid(x @ w).detach()),
    "rrelu": lambda x, w, b: F.rrelu(x @ w, training=True) @ w,
    "alpha dropout": lambda x, w, b: F.alpha_dropout((x @ w).tanh(), 0.5, training=True) @ w,
    # Copies that a compiler may leave out.
    "clone of an input": lambda x, w, b: (x.clone() * 1) @ w,
    "clone of an input that is an output too": lambda x, w, b: (x.clone(), x.clone().exp() @ w),
    "clone of what is saved": lambda x, w, b: (x @ w).exp().clone().exp() @ w,
    "output that is a clone of what is saved": lambda x, w, b: ((h := (x @ w).exp()) @ w, h.clone()),
    "times one, plus zero": lambda x, w, b: ((x * 1 + 0).exp() @ w + 0) * 1,
    "to the same dtype": lambda x, w, b: x.to(torch.float32).exp().to(torch.float32) @ w,
    "contiguous": lambda x, w, b: (x @ w).contiguous().sin() @ w,
    "transposed and contiguous": lambda x, w, b: (x @ w).t().contiguous().sin().t() @ w,
    "clone of a buffer": lambda x, w, b: (x * b.clone()).exp() @ w,
    "power of one": lambda x, w, b: (x**1).exp() ** 1 @ w,
    "repeated once": lambda x, w, b: (x @ w).repeat(1, 1).exp() @ w,
    "padded by nothing": lambda x, w, b: F.pad((x @ w).exp(), (0, 0)) @ w,
    # Views.
    "transposed": lambda x, w, b: (x @ w).t().sin().t() @ w,
    "view of four dimensions": lambda x, w, b: (x @ w).view(2, 4, 4, 4).permute(0, 2, 1, 3).sin().reshape(8, 16) @ w,
    "slice": lambda x, w, b: (x @ w)[2:6].exp() @ w,
    "several slices": lambda x, w, b: (h := (x @ w).exp())[:, :8] @ w[:8] * (h[:, 8:] @ w[8:]),
    "slice of an input": lambda x, w, b: x[2:6].exp() @ w[:, 3:],
    "chunks": lambda x, w, b: torch.stack([(c @ w[:4]).sin() for c in (x @ w).chunk(4, -1)]),
    "split and joined": lambda x, w, b: torch.cat([c.exp() for c in (x @ w).split((3, 5))]) @ w,
    "joined and saved": lambda x, w, b: torch.cat(((h := (x @ w).sin()), h.cos())).exp() @ w,
    "stacked and saved": lambda x, w, b: torch.stack(((h := (x @ w).sin()), h)).square() @ w,
    "expanded": lambda x, w, b: (x @ w).mean(0).expand(8, 16).sin() @ w,
    "selected": lambda x, w, b: (x @ w).exp()[3] @ w,
    "unbound": lambda x, w, b: torch.stack([c.exp() @ w for c in (x @ w).view(2, 4, 16).unbind()]),
    "as strided": lambda x, w, b: (x @ w).exp().as_strided((4, 16), (32, 1)).sin() @ w,
    "flipped and rolled": lambda x, w, b: (x @ w).flip(0).roll(2, 1).exp() @ w,
    "diagonal": lambda x, w, b: (x @ w)[:, :8].diagonal().exp() * (x @ w).exp()[:, 0],
    "unfolded": lambda x, w, b: (x @ w).unfold(1, 4, 2).exp().sum(-1),
    "other dtype of the same bytes": lambda x, w, b: (x @ w).exp() * (x @ w).detach().view(torch.int32).float(),
    # Changes in place.
    "in place": _in_place,
    "in place on a view": lambda x, w, b: _half_doubled((x @ w).sin()) @ w,
    "in place after it was saved in a copy": lambda x, w, b: (h := (x @ w).exp()).sin() @ w + h.clone().mul_(2),
    "buffer changed": lambda x, w, b: (x @ w) * b.add_(1) @ w,
    "buffer changed to what is saved": lambda x, w, b: _set(b, (x @ w).exp().mean(0)) * x @ w,
    "buffer changed after its use": lambda x, w, b: _then((x + b).exp() @ w, lambda: b.mul_(3)),
    "values set by indices": lambda x, w, b: _put((x @ w).sin(), b) @ w,
    "scattered": lambda x, w, b: (x @ w).exp().scatter(1, torch.arange(8)[:, None], 0.5).sin() @ w,
    "added by indices": lambda x, w, b: (x @ w).exp().index_add(0, torch.tensor([1, 1]), x[:2]).sin() @ w,
    "filled": lambda x, w, b: (x @ w).exp().masked_fill(x > 0, 2.0).sin() @ w,
    # What the caller gets.
    "output that is saved": lambda x, w, b: (x @ w).exp(),
    "output that is a view of what is saved": lambda x, w, b: ((h := (x @ w).exp())[2:4], h @ w),
    "the same output twice": lambda x, w, b: ((h := (x @ w).exp()), h),
    "outputs that share memory": lambda x, w, b: ((h := (x @ w).exp()).view(-1), h.t()),
    "input as output": lambda x, w, b: (x, (x @ w).exp() @ w),
    "view of an input as output": lambda x, w, b: (x[1:], (x @ w).exp() @ w),
    "detached output": lambda x, w, b: ((h := (x @ w).exp()).detach(), h @ w),
    "output without gradient": lambda x, w, b: ((h := (x @ w).exp()) @ w, h.argmax(-1)),
    "nested outputs": lambda x, w, b: ((x @ w).exp() @ w, ((x @ w).sin() @ w, b + 1)),
    # Gradients that are saved tensors, or none.
    "gradient that is a saved tensor": lambda x, w, b: (x * (b + 0.5).exp()).sum(),
    "gradient that is a saved result": lambda x, w, b: ((x @ w).exp().detach() * x).sum(),
    "part without gradient": lambda x, w, b: _no_grad((x @ w).exp()) * x @ w,
    "input used twice": lambda x, w, b: (x.exp() @ w) * (x.exp() @ w).sin(),
    # Modules.
    "embedding": lambda x, w, b: F.embedding(torch.tensor([[1, 3], [3, 0]]), w).exp() @ w,
    "convolution and batch norm": lambda x, w, b: _convolved(x, w, b),
    "convolution, channels last": lambda x, w, b: _convolved(x, w, b, memory_format=torch.channels_last),
    "max pool": lambda x, w, b: F.max_pool2d((x @ w).view(1, 2, 8, 8).exp(), 2).sin(),
    "attention": lambda x, w, b: _attention(x, w),
    "causal attention": lambda x, w, b: _attention(x, w, is_causal=True),
    "attention with a mask": lambda x, w, b: _attention(x, w, attn_mask=torch.zeros(4, 4)),
    "checkpointed part": lambda x, w, b: checkpoint(lambda h: (h @ w).exp().sin(), x @ w, use_reentrant=False) @ w,
    "autocast": lambda x, w, b: _autocast(x, w),
    "bfloat16, read where it is computed": lambda x, w, b: _read_before_it_is_rounded(x.bfloat16(), w.bfloat16()),
}  # fmt: skip


def _half_doubled(hidden: Tensor) -> Tensor:
    hidden[:4].mul_(2)
    return hidden


def _set(buffer: Tensor, values: Tensor) -> Tensor:
    with torch.no_grad():
        buffer.copy_(values)
    return values


def _then(result: Tensor, change: Callable[[], object]) -> Tensor:
    change()
    return result


def _put(hidden: Tensor, buffer: Tensor) -> Tensor:
    hidden[torch.tensor([1, 3])] = buffer
    return hidden


def _no_grad(values: Tensor) -> Tensor:
    with torch.no_grad():
        return values.exp()


def _convolved(x: Tensor, w: Tensor, b: Tensor, **options: Any) -> Tensor:
    images = (x @ w).view(2, 4, 4, 4).contiguous(**options)
    mean = b[:4]
    hidden = F.conv2d(images, w[:, :4].reshape(4, 4, 2, 2), padding=1)
    return F.batch_norm(hidden, mean, mean + 1, training=True).relu()


def _attention(x: Tensor, w: Tensor, **options: Any) -> Tensor:
    heads = [(x @ each).view(2, 4, 2, 8).transpose(1, 2) for each in (w, w * 2, w.t())]
    result = F.scaled_dot_product_attention(*heads, **options)
    return result.transpose(1, 2).reshape(8, 16) @ w


def _autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.gelu(x @ w) @ w


def _read_before_it_is_rounded(x: Tensor, w: Tensor) -> Tensor:
    saved = F.softplus(x) + F.elu(x)
    difference = x - saved
    return difference / (x.abs() + 1) * torch.addmm(difference, saved, w)
